"""The attention of `parted_attention` with keys in the order in which the tensor cores take them. On Hopper.

A warp has sixteen keys of each tile, with their values, in registers before the query is there, and goes on to their
end without the other warps: what the warps found meets once, in shared memory. Written in Gluon, Triton's lower
language, which lets a kernel say how its numbers lie.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from unspool.kernels.gpu.attention.split_attention import UNIT
from unspool.kernels.gpu.gluon_launching import ask_for, let_next_start, wait_for_input
from unspool.kernels.gpu.launching import LINE_BYTES, launch, launch_options

if TYPE_CHECKING:
    from unspool.kernels.gpu.attention.parted_attention import PartedTiling, Parts

KEYS: Final = 16  # of a warp in a tile


@gluon.jit
def divide_keys(length, SPLITS: gl.constexpr, BLOCK: gl.constexpr):
    """As `parted_attention.divide_keys`, which Gluon can't call."""
    chunk = gl.maximum(gl.cdiv(gl.cdiv(length, SPLITS), BLOCK), 1) * BLOCK
    return chunk, gl.maximum(gl.cdiv(length, chunk), 1)


@gluon.jit
def _load_keys(keys, place, column, end, WARPS: gl.constexpr, TILES: gl.constexpr, POSITION: gl.constexpr):
    """Keys (or values) from `place` on, in tiles (warps, 16, width)."""
    at = keys + place.to(gl.int64) * POSITION + column
    ks = ()
    for tile in gl.static_range(TILES):
        is_held = (place + tile * WARPS * 16 < end) & (column >= 0)
        ks = ks + (gl.load(at + tile * WARPS * 16 * POSITION, mask=is_held, other=0.0),)
    return ks


@gluon.jit
def _load_biases(
    BIASES, head, length, place, end, WARPS: gl.constexpr, TILES: gl.constexpr, DISTANCES: gl.constexpr
):  # fmt: skip
    """What is added to the scores of some tiles, and which of their keys there are: (warps, 16) each."""
    biases, are_there = (), ()
    for tile in gl.static_range(TILES):
        at = place + tile * WARPS * 16
        bias = gl.full(at.shape, 0.0, gl.float32, at.type.layout)
        if DISTANCES > 0:
            back = gl.minimum(gl.maximum(length - at, 0), DISTANCES - 1)
            bias = gl.load(BIASES + head * DISTANCES + back, mask=at < end, other=0.0)
        biases = biases + (bias,)
        are_there = are_there + (at < end,)
    return biases, are_there


@gluon.jit
def _continue(
    q, ks, vs, biases, are_there, scale, highest, total, read,
    WARPS: gl.constexpr, SUMS: gl.constexpr, A: gl.constexpr,
):  # fmt: skip
    """Continue each warp's online softmax over its keys of some tiles."""
    scores = ()
    higher = gl.full([WARPS, 16], float("-inf"), gl.float32, gl.SliceLayout(2, SUMS))
    for tile in gl.static_range(len(ks)):
        score = gl.max(mma_v2(ks[tile], q, gl.zeros([WARPS, 16, 8], gl.float32, SUMS)), 2)  # all columns are equal
        score = gl.where(are_there[tile], score * scale + biases[tile], float("-inf"))
        scores = scores + (score,)
        higher = gl.maximum(higher, score)
    higher = gl.maximum(highest, gl.max(higher, 1))
    base = gl.where(higher == float("-inf"), 0.0, higher)
    fade = gl.exp(highest - base)
    sums = gl.zeros([WARPS, 16], gl.float32, gl.SliceLayout(2, SUMS))
    found = gl.full(vs[0].shape, 0.0, gl.float32, A)
    for tile in gl.static_range(len(ks)):
        weights = gl.exp(scores[tile] - base[:, None])
        sums += weights
        weights = gl.convert_layout(weights, gl.SliceLayout(2, A))  # the same threads have them
        found += vs[tile].to(gl.float32) * weights[:, :, None]
    total = total * fade + gl.sum(sums, 1)
    fade = gl.convert_layout(fade, gl.SliceLayout(1, gl.SliceLayout(1, A)))
    return higher, total, read * fade[:, None] + gl.sum(found, 1)


@gluon.jit(do_not_specialize=["layer"])
def _attend_held(
    Q, BASE, TABLE, LENGTH, BIASES, VALUES, STATS, layer, scale,
    HEADS: gl.constexpr, D: gl.constexpr, SPLITS: gl.constexpr, TILES: gl.constexpr, WARPS: gl.constexpr,
    UNIT: gl.constexpr, DISTANCES: gl.constexpr, WRITES: gl.constexpr, LINE_BYTES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, SUMS, 8)
    B: gl.constexpr = gl.DotOperandLayout(1, SUMS, 8)
    SCORES: gl.constexpr = gl.SliceLayout(2, SUMS)
    RESULT: gl.constexpr = gl.BlockedLayout([WARPS, 1], [1, 32], [1, WARPS], [1, 0])
    LINES: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    POSITION: gl.constexpr = 2 * HEADS * D  # numbers per position
    BLOCK: gl.constexpr = WARPS * 16 * TILES
    head, split = gl.program_id(0), gl.program_id(1)
    length = gl.load(LENGTH).to(gl.int32)
    keys = BASE + gl.load(TABLE + layer) * UNIT + head * D
    chunk, used = divide_keys(length, SPLITS, BLOCK)
    begin = split * chunk
    end = gl.minimum(begin + chunk, length)
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, A)))
    key = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, A)))
    column = gl.arange(0, D, gl.SliceLayout(0, gl.SliceLayout(1, A)))[None, None, :]
    place = begin + warp[:, None, None] * 16 + key[None, :, None]
    ks = _load_keys(keys, place, column, end, WARPS, TILES, POSITION)
    vs = _load_keys(keys + HEADS * D, place, column, end, WARPS, TILES, POSITION)
    LINE: gl.constexpr = LINE_BYTES * 8 // Q.dtype.element_ty.primitive_bitwidth  # numbers
    for start in range(begin + BLOCK, end, BLOCK):
        asked = start + gl.arange(0, BLOCK, LINES)
        for number in gl.static_range(0, D, LINE):
            lines = keys + asked.to(gl.int64) * POSITION + number
            ask_for(lines, asked < end, PDL)
            ask_for(lines + HEADS * D, asked < end, PDL)
    let_next_start(PDL)
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, SCORES))
    scored = begin + warp[:, None] * 16 + gl.arange(0, 16, gl.SliceLayout(0, SCORES))[None, :]
    biases, are_there = _load_biases(BIASES, head, length, scored, end, WARPS, TILES, DISTANCES)
    new_bias = 0.0
    if WRITES and DISTANCES > 0:
        new_bias = gl.load(BIASES + head * DISTANCES)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ROWS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    top_room = gl.allocate_shared_memory(gl.float32, [WARPS], FLAT)
    sum_room = gl.allocate_shared_memory(gl.float32, [WARPS], FLAT)
    read_room = gl.allocate_shared_memory(gl.float32, [WARPS, D], ROWS)
    wait_for_input(PDL)

    if (length >= 0) & (split < used):
        number = gl.arange(0, D, gl.SliceLayout(0, gl.SliceLayout(2, B)))[None, :, None]
        number += 0 * gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, B)))[None, None, :]
        q = gl.load(Q + head * D + number).broadcast_to([WARPS, D, 8])
        rd = gl.arange(0, D, gl.SliceLayout(0, RESULT))
        seen_ks, seen_vs, seen_biases, seen_there = ks, vs, biases, are_there
        if WRITES:  # one more tile, all of the new key: the last split sees one of them, and writes it
            new_at, is_last = Q + (HEADS + head) * D, split == used - 1
            k_new, v_new = gl.load(new_at + column), gl.load(new_at + HEADS * D + column)
            if is_last:
                into = keys + length.to(gl.int64) * POSITION + rd
                key_new, value_new = gl.load(new_at + rd), gl.load(new_at + HEADS * D + rd)
                gl.store(into, key_new)
                gl.store(into + HEADS * D, value_new)
            seen_ks = ks + (k_new.broadcast_to([WARPS, 16, D]),)
            seen_vs = vs + (v_new.broadcast_to([WARPS, 16, D]),)
            seen_biases = biases + (gl.full([WARPS, 16], 0.0, gl.float32, SCORES) + new_bias,)
            seen_there = are_there + ((scored == begin) & is_last,)
        highest = gl.full([WARPS], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
        total = gl.zeros([WARPS], gl.float32, gl.SliceLayout(1, SCORES))
        read = gl.zeros([WARPS, D], gl.float32, gl.SliceLayout(1, A))
        highest, total, read = _continue(
            q, seen_ks, seen_vs, seen_biases, seen_there, scale, highest, total, read, WARPS, SUMS, A
        )
        for start in range(begin + BLOCK, end, BLOCK):
            later = start - begin
            k_others = _load_keys(keys, place + later, column, end, WARPS, TILES, POSITION)
            v_others = _load_keys(keys + HEADS * D, place + later, column, end, WARPS, TILES, POSITION)
            others, are_others = _load_biases(BIASES, head, length, scored + later, end, WARPS, TILES, DISTANCES)
            highest, total, read = _continue(
                q, k_others, v_others, others, are_others, scale, highest, total, read, WARPS, SUMS, A
            )
        top_room.store(highest)
        sum_room.store(total)
        read_room.store(read)
        gl.thread_barrier()
        tops, sums = top_room.load(gl.SliceLayout(1, RESULT)), sum_room.load(gl.SliceLayout(1, RESULT))
        peak = gl.max(tops, 0)
        fades = gl.exp(tops - gl.where(peak == float("-inf"), 0.0, peak))
        whole = gl.sum(sums * fades, 0)
        part = split * HEADS + head
        joined = gl.sum(read_room.load(RESULT) * fades[:, None], 0) / whole
        gl.store(VALUES + part * D + rd, joined.to(VALUES.dtype.element_ty))
        gl.store(STATS + part, peak)
        gl.store(STATS + SPLITS * HEADS + part, whole)


def attend_held(
    queries: torch.Tensor,
    base: torch.Tensor,
    table: torch.Tensor,
    biases: torch.Tensor | None,  # (heads, distances) float32
    parts: Parts,  # written
    layer: int,
    scale: float,
    tiling: PartedTiling,
    *,
    writes: bool,
) -> None:
    """As `parted_attention.PartedAttention`, whose arguments these are."""
    splits, heads, width = parts.values.shape
    launch(
        _attend_held,
        (heads, splits),
        queries,
        base,
        table,
        parts.length,
        biases if biases is not None else parts.stats,
        parts.values,
        parts.stats,
        layer,
        scale,
        HEADS=heads,
        D=width,
        SPLITS=splits,
        TILES=tiling.block // (KEYS * tiling.warps),
        WARPS=tiling.warps,
        UNIT=UNIT,
        DISTANCES=biases.shape[1] if biases is not None else 0,
        WRITES=writes,
        LINE_BYTES=LINE_BYTES,
        num_warps=tiling.warps,
        **launch_options(),
    )
