"""Attention of a row's new token, left in parts that the next product adds up.

The reference is `kernels.attention.attend`. Keys are split among programs; none of them waits for the others to combine
the parts, because every program of the product that follows (`products.parts_product`) can do so while it loads its
input. A program's first keys are loaded, and its others prefetched, before the queries are ready. In 16 bits, on
Hopper, the kernel is `held_attention`'s, which knows several rows, and heads that share keys; here every head has keys
of its own.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from unspool.kernels.gpu.attention.output_parts import WARP_KEYS, PartedTiling, Parts, Turning
from unspool.kernels.gpu.attention.split_attention import UNIT, HeadShape
from unspool.kernels.gpu.launching import (
    LINE_BYTES,
    ask_for,
    launch,
    launch_options,
    let_next_start,
    wait_for_input,
)
from unspool.kernels.gpu.products.rows_tilings import starts_early
from unspool.kernels.key_layout import PLAIN, KeyLayout

NARROWEST: Final = 16  # numbers per head
_HELD_WIDTHS: Final = (32, 64, 128)  # numbers per head that `held_attention` takes

OWN: Final = PartedTiling(64, 4, 4)
OTHERS: Final = PartedTiling(128, 4, 4)
OTHERS_OF_SOUND: Final = PartedTiling(256, 8, 8)  # Whisper: 1,500 positions
HELD_OF_SOUND: Final = PartedTiling(512, 3, 8)  # the same for `held_attention`: 0.955 of the step with (256, 6, 4)

# One row of a decoder whose query heads share keys, by the number of keys up to which it is the fastest. Whole steps on
# an H200, 2026-11-18: 0.92 to 0.97 of the time of `step_attention` up to 250 keys, 0.75 to 0.93 at 3,900.
_SHARED_OF_WIDTHS: Final = {
    64: {512: PartedTiling(128, 4, 8), 2048: PartedTiling(128, 8, 8), 12_288: PartedTiling(256, 8, 8)},
    128: {512: PartedTiling(128, 4, 8), 2048: PartedTiling(128, 8, 8), 12_288: PartedTiling(128, 16, 8)},
}
_SHARED_HEADS: Final = 8  # of keys: more were not measured
_SHARING: Final = range(2, 9)  # query heads to one of keys: with one, steps of GPT-2 XL take 1.03 of the time


@triton.jit
def divide_keys(length, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """How many keys a program takes, and how many programs have any: at least one."""
    chunk = tl.maximum(tl.cdiv(tl.cdiv(length, SPLITS), BLOCK), 1) * BLOCK
    return chunk, tl.maximum(tl.cdiv(length, chunk), 1)


@triton.jit
def _continue(q, k, v, bias, is_key, highest, total, read):
    """Continue an online softmax over some keys (keys, width)."""
    scores = tl.sum(k.to(tl.float32) * q[None, :], 1) + bias
    scores = tl.where(is_key, scores, float("-inf"))
    higher = tl.maximum(highest, tl.max(scores, 0))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    fade = tl.exp(highest - base)
    weights = tl.exp(scores - base)
    total = total * fade + tl.sum(weights, 0)
    read = read * fade + tl.sum(weights[:, None] * v.to(tl.float32), 0)
    return higher, total, read


@triton.jit
def _load_biases(BIASES, head, back, is_key, DISTANCES: tl.constexpr):
    """The biases of distances `back`, of a table (heads, DISTANCES); the last is for all beyond."""
    bias = 0.0
    if DISTANCES > 0:
        bias = tl.load(BIASES + head * DISTANCES + tl.minimum(back, DISTANCES - 1), mask=is_key, other=0.0)
    return bias


@triton.jit(do_not_specialize=["layer"])
def _attend_one(
    Q, BASE, TABLE, LENGTH, BIASES, VALUES, STATS, layer, scale,
    HEADS: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr,
    DISTANCES: tl.constexpr, WRITES: tl.constexpr, LINE_BYTES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    head, split = tl.program_id(0), tl.program_id(1)
    LINE: tl.constexpr = LINE_BYTES * 8 // Q.dtype.element_ty.primitive_bitwidth  # numbers
    POSITION: tl.constexpr = 2 * HEADS * D  # numbers per position
    length = tl.load(LENGTH).to(tl.int32)
    chunk, used = divide_keys(length, SPLITS, BLOCK)
    begin = split * chunk
    end = tl.minimum(begin + chunk, length)
    keys = BASE + tl.load(TABLE + layer) * UNIT + head * D
    rd, tile = tl.arange(0, D), tl.arange(0, BLOCK)
    place = begin + tile
    at = keys + place.to(tl.int64)[:, None] * POSITION + rd[None, :]
    is_held = (place < end)[:, None]
    k = tl.load(at, mask=is_held, other=0.0)
    v = tl.load(at + HEADS * D, mask=is_held, other=0.0)
    bias = _load_biases(BIASES, head, length - place, place < end, DISTANCES)
    LINES: tl.constexpr = (D + LINE - 1) // LINE
    number = tl.arange(0, LINES) * LINE
    for start in tl.range(begin + BLOCK, end, BLOCK):
        asked = start + tile
        lines = keys + asked.to(tl.int64)[:, None] * POSITION + number[None, :]
        is_asked = (asked < end)[:, None] & (number < D)[None, :]
        ask_for(lines, is_asked, PDL)
        ask_for(lines + HEADS * D, is_asked, PDL)
    let_next_start(PDL)
    wait_for_input(PDL)
    if (length >= 0) & (split < used):
        q = tl.load(Q + head * D + rd).to(tl.float32) * scale
        k_new, v_new = rd, rd
        if WRITES:
            new_at = Q + (HEADS + head) * D + rd
            k_new, v_new = tl.load(new_at), tl.load(new_at + HEADS * D)
        highest, total = float("-inf"), 0.0
        read = tl.zeros((D,), tl.float32)
        highest, total, read = _continue(q, k, v, bias, place < end, highest, total, read)
        for start in tl.range(begin + BLOCK, end, BLOCK):
            others = start + tile
            others_at = keys + others.to(tl.int64)[:, None] * POSITION + rd[None, :]
            is_other = (others < end)[:, None]
            k_other = tl.load(others_at, mask=is_other, other=0.0)
            v_other = tl.load(others_at + HEADS * D, mask=is_other, other=0.0)
            bias = _load_biases(BIASES, head, length - others, others < end, DISTANCES)
            highest, total, read = _continue(q, k_other, v_other, bias, others < end, highest, total, read)
        if WRITES:
            if split == used - 1:  # it sees the new key, and writes it
                score = tl.sum(q * k_new.to(tl.float32), 0)
                if DISTANCES > 0:
                    score += tl.load(BIASES + head * DISTANCES)
                higher = tl.maximum(highest, score)
                fade = tl.exp(highest - higher)
                weight = tl.exp(score - higher)
                total = total * fade + weight
                read = read * fade + weight * v_new.to(tl.float32)
                highest = higher
                into = keys + length.to(tl.int64) * POSITION + rd
                tl.store(into, k_new)
                tl.store(into + HEADS * D, v_new)
        part = split * HEADS + head
        tl.store(VALUES + part * D + rd, (read / total).to(VALUES.dtype.element_ty))
        tl.store(STATS + part, highest)
        tl.store(STATS + SPLITS * HEADS + part, total)


class PartedAttention:
    """The attention of captured steps of one token a row, over its own keys or over those of its source."""

    def __init__(
        self,
        shape: HeadShape,
        device: torch.device,
        dtype: torch.dtype,
        *,
        writes: bool,  # queries are followed by a new key and value, which are written after the others
        rows: int = 1,
        rows_each: int = 1,  # that read the same keys
        distances: int = 0,  # biases are a table (heads, distances)
        is_sound: bool = False,  # the source is Whisper's
        tiling: PartedTiling | None = None,
    ) -> None:
        self._shape, self._writes, self._distances, self._rows_each = shape, writes, distances, rows_each
        can_hold = holds_keys(shape, dtype)
        of_sound = HELD_OF_SOUND if can_hold else OTHERS_OF_SOUND
        self._tiling = tiling or (OWN if writes else of_sound if is_sound else OTHERS)
        self._is_held = can_hold and self._tiling.block % (WARP_KEYS * self._tiling.warps) == 0
        assert rows == 1 or self._is_held, "several rows are for `held_attention`"
        splits = self._tiling.splits
        self._values = torch.zeros(rows, splits, shape.heads, shape.width, dtype=dtype, device=device)
        self._stats = torch.zeros(rows, 2, splits, shape.heads, dtype=torch.float32, device=device)

    def __call__(
        self,
        queries: torch.Tensor,  # (rows, heads * width), or three times as many with the new key and value
        base: torch.Tensor,  # of the buffers' dtype: addresses are offsets from it
        table: torch.Tensor,  # int64: addresses of the layers' keys, and the positions of a row
        lengths: torch.Tensor,  # (rows / rows_each,): keys held, -1 for an absent row
        layer: int,
        num_layers: int,
        scale: float,
        *,
        biases: torch.Tensor | None = None,  # (heads, distances) float32
        turning: Turning | None = None,
    ) -> Parts:
        """Attend, and write the new key."""
        shape, tiling = self._shape, self._tiling
        parts = Parts(self._values, self._stats, lengths, tiling.block, self._rows_each)
        if self._is_held:
            from unspool.kernels.gpu.attention.held_attention import attend_held

            writes = self._writes
            attend_held(
                queries,
                base,
                table,
                biases,
                parts,
                layer,
                num_layers,
                scale,
                tiling,
                kv_heads=shape.kv_heads,
                writes=writes,
                turning=turning,
            )
            return parts
        assert turning is None, "queries are turned by `held_attention`"
        launch(
            _attend_one,
            (shape.heads, tiling.splits),
            queries,
            base,
            table,
            lengths,
            biases if biases is not None else self._stats,
            self._values,
            self._stats,
            layer,
            scale,
            HEADS=shape.heads,
            D=shape.width,
            SPLITS=tiling.splits,
            BLOCK=tiling.block,
            UNIT=UNIT,
            DISTANCES=self._distances,
            WRITES=self._writes,
            LINE_BYTES=LINE_BYTES,
            num_warps=tiling.warps,
            **launch_options(),
        )
        return parts


def holds_keys(shape: HeadShape, dtype: torch.dtype) -> bool:
    """Whether the kernel is `held_attention`'s."""
    return dtype != torch.float32 and shape.width in _HELD_WIDTHS and starts_early()


def list_shared_tilings(shape: HeadShape, dtype: torch.dtype) -> dict[int, PartedTiling]:
    """The tilings for one row of heads that share keys, by the most keys that they are for; none for other heads."""
    is_measured = shape.kv_heads <= _SHARED_HEADS and shape.heads // shape.kv_heads in _SHARING
    if not is_measured or not holds_keys(shape, dtype):
        return {}
    return _SHARED_OF_WIDTHS.get(shape.width, {})


def takes_parts(shape: HeadShape, layout: KeyLayout) -> bool:
    """Whether heads and their keys are of the kind that this attention is written for."""
    width = shape.width
    return layout == PLAIN and shape.heads == shape.kv_heads and width >= NARROWEST and width & (width - 1) == 0
