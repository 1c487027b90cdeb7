"""Attention of a captured pass over the keys of sources, which an encoder made once and nothing changes.

The reference is `kernels.branched.attend_shared`. All tokens of a source, those of its beams included, are queries of
one program, so a source's keys are read once. A program's first keys are loaded, and its others prefetched, before the
queries are ready.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl

from unspool.kernels.gpu.attention.split_attention import (
    SMALLEST_DOT,
    UNIT,
    HeadShape,
    put_together,
    read_values,
    score_keys,
)
from unspool.kernels.gpu.attention.step_tilings import LARGEST_BLOCK_BYTES, count_splits, pad_width
from unspool.kernels.gpu.launching import (
    LINE_BYTES,
    ask_for,
    launch,
    launch_options,
    let_next_start,
    wait_for_input,
)

MOST_QUERIES: Final = 64  # of a source


@dataclass(frozen=True, slots=True)
class CrossTiling:
    """How a source's keys are split: keys per tile, the fewest keys per program, and the number of programs."""

    block: int
    chunk: int
    programs: int
    warps: int
    stages: int


USUAL: Final = CrossTiling(128, 128, 640, 4, 2)  # found on an H200, 2026-11-17


@triton.jit(do_not_specialize=["layer", "num_layers", "num_splits", "smallest_chunk"])
def _attend_across(
    Q, OUT, BASE, SOURCES, PARTS, STATS, COUNTS,
    layer, num_layers, scale, num_splits, smallest_chunk,
    HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, TOKENS: tl.constexpr, GP: tl.constexpr, GJ: tl.constexpr,
    BLOCK: tl.constexpr, UNIT: tl.constexpr, MOST_SPLITS: tl.constexpr, LINE_BYTES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    source, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    POSITION: tl.constexpr = 2 * HEADS * D  # numbers per position
    length = tl.load(SOURCES + num_layers + 1 + source).to(tl.int32)
    apart = tl.load(SOURCES + num_layers) * POSITION
    keys = BASE + tl.load(SOURCES + layer) * UNIT + source * apart + head * D
    chunk = tl.maximum(tl.cdiv(tl.cdiv(length, num_splits), BLOCK) * BLOCK, smallest_chunk)
    used = tl.cdiv(length, chunk)
    begin = split * chunk
    end = tl.minimum(begin + chunk, length)
    LINE: tl.constexpr = LINE_BYTES * 8 // Q.dtype.element_ty.primitive_bitwidth  # numbers
    LINES: tl.constexpr = (DP + LINE - 1) // LINE
    number, rd = tl.arange(0, LINES) * LINE, tl.arange(0, DP)
    place = begin + tl.arange(0, BLOCK)
    at = keys + place.to(tl.int64)[:, None] * POSITION + rd[None, :]
    is_held = (place < end)[:, None] & (rd < D)[None, :]
    k = tl.load(at, mask=is_held, other=0.0)
    v = tl.load(at + HEADS * D, mask=is_held, other=0.0)
    for start in tl.range(begin + BLOCK, end, BLOCK):
        asked = start + tl.arange(0, BLOCK)
        lines = keys + asked.to(tl.int64)[:, None] * POSITION + number[None, :]
        is_asked = (asked < end)[:, None] & (number < D)[None, :]
        ask_for(lines, is_asked, PDL)
        ask_for(lines + HEADS * D, is_asked, PDL)
    let_next_start(PDL)
    wait_for_input(PDL)
    if split < used:
        rq = tl.arange(0, GP)
        is_query, is_number = rq < TOKENS, rd < D
        queries_at = Q + (source * TOKENS + rq).to(tl.int64)[:, None] * (HEADS * D) + head * D + rd[None, :]
        query = tl.load(queries_at, mask=is_query[:, None] & is_number[None, :], other=0.0)
        none = tl.full((GP,), 0.0, tl.float32)
        highest = tl.full((GP,), float("-inf"), tl.float32)
        total = tl.full((GP,), 0.0, tl.float32)
        read = tl.full((GP, DP), 0.0, tl.float32)
        scores = score_keys(query, k, place, none, scale, 1.0, False, False)
        scores = tl.where((place < end)[None, :], scores, float("-inf"))
        highest, total, read = read_values(scores, v, highest, total, read, False)
        for start in tl.range(begin + BLOCK, end, BLOCK):
            others = start + tl.arange(0, BLOCK)
            others_at = keys + others.to(tl.int64)[:, None] * POSITION + rd[None, :]
            is_other = (others < end)[:, None] & is_number[None, :]
            k_other = tl.load(others_at, mask=is_other, other=0.0)
            v_other = tl.load(others_at + HEADS * D, mask=is_other, other=0.0)
            scores = score_keys(query, k_other, others, none, scale, 1.0, False, False)
            scores = tl.where((others < end)[None, :], scores, float("-inf"))
            highest, total, read = read_values(scores, v_other, highest, total, read, False)
        put_together(
            read, highest, total, OUT + source.to(tl.int64) * (TOKENS * HEADS * D) + head * D, PARTS, STATS, COUNTS,
            source * HEADS + head, split, used, num_splits, TOKENS, 1, HEADS * D, D, GP, DP, GJ, MOST_SPLITS,
            STATS, False,
        )  # fmt: skip


class CrossAttention:
    """The cross-attention of captured passes of one shape."""

    def __init__(
        self,
        num_sources: int,
        num_tokens: int,  # of each source
        shape: HeadShape,
        device: torch.device,
        tiling: CrossTiling | None = None,
    ) -> None:
        tiling = tiling or USUAL
        self._sources, self._tokens, self._shape, self._tiling = num_sources, num_tokens, shape, tiling
        self._width = pad_width(shape)
        self._queries = max(SMALLEST_DOT, triton.next_power_of_2(num_tokens))
        self.splits = count_splits(tiling.programs // (num_sources * shape.heads))
        num_parts = num_sources * shape.heads * self.splits * self._queries
        self._parts = torch.empty(num_parts, self._width, dtype=torch.float32, device=device)
        self._stats = torch.empty(num_parts, 2, dtype=torch.float32, device=device)
        self._counts = torch.zeros(num_sources * shape.heads, dtype=torch.int32, device=device)

    def __call__(
        self,
        queries: torch.Tensor,  # (tokens of all sources, heads * width)
        out: torch.Tensor,  # likewise; tokens of a source without positions keep what they have
        base: torch.Tensor,  # of the buffers' dtype: addresses are offsets from it
        sources: torch.Tensor,  # int64: addresses of the layers' keys, positions of a row, the sources' lengths
        layer: int,
        num_layers: int,
        scale: float,
    ) -> None:
        """Attend to the first positions of each source's row, as many as its length says."""
        shape, tiling = self._shape, self._tiling
        block = max(16, min(tiling.block, LARGEST_BLOCK_BYTES // (self._width * queries.element_size())))
        launch(
            _attend_across,
            (self._sources, shape.heads, self.splits),
            queries,
            out,
            base,
            sources,
            self._parts,
            self._stats,
            self._counts,
            layer,
            num_layers,
            scale,
            self.splits,
            tiling.chunk,
            HEADS=shape.heads,
            D=shape.width,
            DP=self._width,
            TOKENS=self._tokens,
            GP=self._queries,
            GJ=triton.next_power_of_2(self._tokens),
            BLOCK=block,
            UNIT=UNIT,
            MOST_SPLITS=triton.next_power_of_2(max(2, self.splits)),
            LINE_BYTES=LINE_BYTES,
            num_warps=tiling.warps,
            num_stages=tiling.stages,
            **launch_options(),
        )
