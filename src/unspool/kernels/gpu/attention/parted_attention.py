"""Attention of one new token whose heads have keys of their own, left in parts that the next product adds up.

The reference is `kernels.attention.attend`. Keys are split among programs; none of them waits for the others to combine
the parts, because every program of the product that follows (`products.parts_product`) can do so while it loads its
input. A program's first keys are loaded, and its others prefetched, before the queries are ready.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl

from unspool.kernels.gpu.attention.split_attention import UNIT, HeadShape
from unspool.kernels.gpu.launching import (
    LINE_BYTES,
    ask_for,
    launch,
    launch_options,
    let_next_start,
    wait_for_input,
)
from unspool.kernels.key_layout import PLAIN, KeyLayout

NARROWEST: Final = 16  # numbers per head


@dataclass(frozen=True, slots=True)
class PartedTiling:
    """How keys are split: keys per tile, the most programs per head, and their warps."""

    block: int
    splits: int
    warps: int


OWN: Final = PartedTiling(64, 4, 4)
OTHERS: Final = PartedTiling(128, 4, 4)
OTHERS_OF_SOUND: Final = PartedTiling(256, 8, 8)  # Whisper: 1,500 positions


@dataclass(frozen=True, slots=True)
class Parts:
    """What the programs of an attention found: outputs of their own keys, and how to weigh them."""

    values: torch.Tensor  # (splits, heads, width)
    stats: torch.Tensor  # (2, splits, heads) float32: the highest scores, and the sums of the weights relative to them
    length: torch.Tensor  # (1,): keys, from which follows how many of the splits there are
    block: int


@triton.jit
def divide_keys(length, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """How many keys a program takes, and how many programs have any: at least one."""
    chunk = tl.maximum(tl.cdiv(tl.cdiv(length, SPLITS), BLOCK), 1) * BLOCK
    return chunk, tl.maximum(tl.cdiv(length, chunk), 1)


@triton.jit
def _load_keys(
    keys, BIASES, head, length, place, end, rd,
    TILES: tl.constexpr, STEP: tl.constexpr, POSITION: tl.constexpr, APART: tl.constexpr, DISTANCES: tl.constexpr,
):  # fmt: skip
    """Keys and values (keys, warps, width) of the positions `place`, of those STEP further, and so on, with biases."""
    ks, vs, biases, seen = (), (), (), ()
    for tile in tl.static_range(TILES):
        at = place + tile * STEP
        lines = keys + at.to(tl.int64)[:, :, None] * POSITION + rd[None, None, :]
        is_key = at < end
        ks = ks + (tl.load(lines, mask=is_key[:, :, None], other=0.0),)
        vs = vs + (tl.load(lines + APART, mask=is_key[:, :, None], other=0.0),)
        bias = 0.0
        if DISTANCES > 0:  # of a table (heads, DISTANCES), the last for all distances beyond
            back = tl.minimum(length - at, DISTANCES - 1)
            bias = tl.load(BIASES + head * DISTANCES + back, mask=is_key, other=0.0)
        biases, seen = biases + (bias,), seen + (is_key,)
    return ks, vs, biases, seen


@triton.jit
def _score(q, ks, biases, seen, TILES: tl.constexpr):
    """The scores (keys, warps) of keys, tile by tile."""
    scores = ()
    for tile in tl.static_range(TILES):
        score = tl.sum(ks[tile].to(tl.float32) * q[None, None, :], 2) + biases[tile]
        scores = scores + (tl.where(seen[tile], score, float("-inf")),)
    return scores


@triton.jit
def _continue(q, loaded, highest, total, read, TILES: tl.constexpr):
    """Continue every warp's online softmax over the keys that `_load_keys` loaded."""
    ks, vs, biases, seen = loaded
    scores = _score(q, ks, biases, seen, TILES)
    most = scores[0]
    for tile in tl.static_range(1, TILES):
        most = tl.maximum(most, scores[tile])
    higher = tl.maximum(highest, tl.max(most, 0))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    fade = tl.exp(highest - base)
    weights = tl.exp(scores[0] - base[None, :])
    whole, found = weights, weights[:, :, None] * vs[0].to(tl.float32)
    for tile in tl.static_range(1, TILES):
        weights = tl.exp(scores[tile] - base[None, :])
        whole += weights
        found += weights[:, :, None] * vs[tile].to(tl.float32)
    return higher, total * fade + tl.sum(whole, 0), read * fade[:, None] + tl.sum(found, 0)


@triton.jit
def _join_pairs(a, b, c, d):
    """Two highest scores with the sums of the weights relative to them, as one."""
    higher = tl.maximum(a, c)
    base = tl.where(higher == float("-inf"), 0.0, higher)
    return higher, b * tl.exp(a - base) + d * tl.exp(c - base)


@triton.jit(do_not_specialize=["layer"])
def _attend_one(
    Q, BASE, TABLE, LENGTH, BIASES, VALUES, STATS, layer, scale,
    HEADS: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr,
    DISTANCES: tl.constexpr, WRITES: tl.constexpr, WARPS: tl.constexpr, LINE_BYTES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    head, split = tl.program_id(0), tl.program_id(1)
    LINE: tl.constexpr = LINE_BYTES * 8 // Q.dtype.element_ty.primitive_bitwidth  # numbers
    POSITION: tl.constexpr = 2 * HEADS * D  # numbers per position
    EACH: tl.constexpr = max(4096 // Q.dtype.element_ty.primitive_bitwidth // D, 1)  # keys that a warp loads at once
    STEP: tl.constexpr = WARPS * EACH
    TILES: tl.constexpr = BLOCK // STEP
    length = tl.load(LENGTH).to(tl.int32)
    chunk, used = divide_keys(length, SPLITS, BLOCK)
    begin = split * chunk
    end = tl.minimum(begin + chunk, length)
    keys = BASE + tl.load(TABLE + layer) * UNIT + head * D
    rd, warp = tl.arange(0, D), tl.arange(0, WARPS)
    place = begin + tl.arange(0, EACH)[:, None] + warp[None, :] * EACH  # this order keeps a warp's keys in its threads
    loaded = _load_keys(keys, BIASES, head, length, place, end, rd, TILES, STEP, POSITION, HEADS * D, DISTANCES)
    LINES: tl.constexpr = (D + LINE - 1) // LINE
    number, tile = tl.arange(0, LINES) * LINE, tl.arange(0, BLOCK)
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
        highest, total = tl.full((WARPS,), float("-inf"), tl.float32), tl.zeros((WARPS,), tl.float32)
        read = tl.zeros((WARPS, D), tl.float32)
        if WRITES:  # the last program sees the new key, its first warp before all others, and writes it
            new_at = Q + (HEADS + head) * D + rd
            k_new, v_new = tl.load(new_at), tl.load(new_at + HEADS * D)
            score = tl.sum(q * k_new.to(tl.float32), 0)
            if DISTANCES > 0:
                score += tl.load(BIASES + head * DISTANCES)
            is_new = (warp == 0) & (split == used - 1)
            highest, total = tl.where(is_new, score, highest), tl.where(is_new, 1.0, total)
            read = tl.where(is_new[:, None], v_new.to(tl.float32)[None, :], read)
            if split == used - 1:
                into = keys + length.to(tl.int64) * POSITION + rd
                tl.store(into, k_new)
                tl.store(into + HEADS * D, v_new)
        highest, total, read = _continue(q, loaded, highest, total, read, TILES)
        for start in tl.range(begin + BLOCK, end, BLOCK):
            more = _load_keys(
                keys, BIASES, head, length, start - begin + place, end, rd,
                TILES, STEP, POSITION, HEADS * D, DISTANCES,
            )  # fmt: skip
            highest, total, read = _continue(q, more, highest, total, read, TILES)
        peak, whole = tl.reduce((highest, total), 0, _join_pairs)
        share = tl.exp(highest - tl.where(peak == float("-inf"), 0.0, peak)) / whole
        read = tl.sum(read * share[:, None], 0)
        part = split * HEADS + head
        tl.store(VALUES + part * D + rd, read.to(VALUES.dtype.element_ty))
        tl.store(STATS + part, peak)
        tl.store(STATS + SPLITS * HEADS + part, whole)


class PartedAttention:
    """The attention of captured steps of one token, over its row's own keys or over those of its source."""

    def __init__(
        self,
        shape: HeadShape,
        device: torch.device,
        dtype: torch.dtype,
        *,
        writes: bool,  # queries are followed by a new key and value, which are written after the others
        distances: int = 0,  # biases are a table (heads, distances)
        tiling: PartedTiling | None = None,
    ) -> None:
        self._shape, self._writes, self._distances = shape, writes, distances
        self._tiling = tiling or (OWN if writes else OTHERS)
        splits = self._tiling.splits
        self._values = torch.zeros(splits, shape.heads, shape.width, dtype=dtype, device=device)
        self._stats = torch.zeros(2, splits, shape.heads, dtype=torch.float32, device=device)

    def __call__(
        self,
        queries: torch.Tensor,  # (1, heads * width), or three times as many with the new key and value
        base: torch.Tensor,  # of the buffers' dtype: addresses are offsets from it
        table: torch.Tensor,  # int64: addresses of the layers' keys
        length: torch.Tensor,  # (1,): keys held, -1 for an absent row
        layer: int,
        scale: float,
        *,
        biases: torch.Tensor | None = None,  # (heads, distances) float32
    ) -> Parts:
        """Attend, and write the new key."""
        shape, tiling = self._shape, self._tiling
        launch(
            _attend_one,
            (shape.heads, tiling.splits),
            queries,
            base,
            table,
            length,
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
            WARPS=tiling.warps,
            LINE_BYTES=LINE_BYTES,
            num_warps=tiling.warps,
            **launch_options(),
        )
        return Parts(self._values, self._stats, length, tiling.block)


def takes_parts(shape: HeadShape, layout: KeyLayout) -> bool:
    """Whether heads and their keys are of the kind that this attention is written for."""
    width = shape.width
    return layout == PLAIN and shape.heads == shape.kv_heads and width >= NARROWEST and width & (width - 1) == 0
