"""What `few_product` does where its input is an attention's output in parts: loading and adding them up. On Hopper.

As `parts_product` does it in Triton's language, in Gluon: of one row through shared memory, so that every warp can take
its slices of it; of several rows straight in the order in which the tensor cores take them.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from unspool.kernels.gpu.attention.held_attention import divide_keys


@gluon.jit
def load_parts(
    VALUES, STATS, used,
    HEADS: gl.constexpr, D: gl.constexpr, SPLITS: gl.constexpr, WARPS: gl.constexpr, PADDED: gl.constexpr,
):  # fmt: skip
    """An attention's parts (PADDED // D, D) (`attention.parted_attention`), one for each split, and their stats."""
    EACH: gl.constexpr = 4 if D >= 16 else 1
    LANES: gl.constexpr = D // EACH if D // EACH < 32 else 32
    HEAD: gl.constexpr = gl.BlockedLayout([1, EACH], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    head = gl.arange(0, PADDED // D, gl.SliceLayout(1, HEAD))
    number = gl.arange(0, D, gl.SliceLayout(0, HEAD))
    values, tops, sums = (), (), ()
    for split in gl.static_range(SPLITS):  # all loads before the first use
        is_part = (head < HEADS) & (split < used)
        at = split * HEADS + head
        is_one = is_part[:, None] & (number >= 0)[None, :]
        values = values + (gl.load(VALUES + at[:, None] * D + number[None, :], mask=is_one, other=0.0),)
        tops = tops + (gl.load(STATS + at, mask=is_part, other=float("-inf")),)
        sums = sums + (gl.load(STATS + SPLITS * HEADS + at, mask=is_part, other=0.0),)
    return values, tops, sums


@gluon.jit
def _weigh_parts(tops, sums, FIRST: gl.constexpr, SPLITS: gl.constexpr):
    """The weights of an attention's parts, whose stats begin at `FIRST`, and what makes their sum 1."""
    peak = tops[FIRST]  # the first split always has keys
    for split in gl.static_range(1, SPLITS):
        peak = gl.maximum(peak, tops[FIRST + split])
    peak = gl.where(peak == float("-inf"), 0.0, peak)
    weights = ()
    whole = gl.full(peak.shape, 0.0, gl.float32, peak.type.layout)
    for split in gl.static_range(SPLITS):
        weight = sums[FIRST + split] * gl.exp(tops[FIRST + split] - peak)
        weights = weights + (weight,)
        whole += weight
    return weights, 1.0 / gl.where(whole == 0.0, 1.0, whole)


@gluon.jit
def join_parts(values, tops, sums, dtype: gl.constexpr, SPLITS: gl.constexpr):
    """The attention's output from what `_load_parts` loaded."""
    weights, share = _weigh_parts(tops, sums, 0, SPLITS)
    read = gl.full(values[0].shape, 0.0, gl.float32, values[0].type.layout)
    for split in gl.static_range(SPLITS):
        read += values[split].to(gl.float32) * (weights[split] * share)[:, None]
    return read.to(dtype)


@gluon.constexpr_function
def lay_groups(warps, columns, group):
    """How slices (warps, columns / group, group, 8) lie that are an operand of the tensor cores in one."""
    numbers = [1, 2, 4, *(32 << bit for bit in range((columns // 32).bit_length() - 1))]
    lanes = [[0, 0, 8, 0], [0, 0, 16, 0], [0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 0, 4]]
    warp_bases = [[1 << bit, 0, 0, 0] for bit in range(warps.bit_length() - 1)]
    bases = [[0, number // group, number % group, 0] for number in numbers]
    return gl.DistributedLinearLayout(bases, lanes, warp_bases, [], [warps, columns // group, group, 8])


@gluon.jit
def count_splits(
    LENGTHS, row, R: gl.constexpr, ROWS_EACH: gl.constexpr, SPLITS: gl.constexpr, BLOCK: gl.constexpr
):  # fmt: skip
    """How many splits there are of each row."""
    _, used = divide_keys(gl.load(LENGTHS + gl.minimum(row, R - 1) // ROWS_EACH).to(gl.int32), SPLITS, BLOCK)
    return gl.where(row < R, used, 0)


@gluon.jit
def join_rows(
    VALUES, STATS, used, used_here, place, row, dtype: gl.constexpr, K: gl.constexpr, TK: gl.constexpr,
    WARPS: gl.constexpr, HEADS: gl.constexpr, D: gl.constexpr, SPLITS: gl.constexpr, GROUP: gl.constexpr,
    GROUPS: gl.constexpr, B: gl.constexpr,
):  # fmt: skip
    """Several rows of an attention in the warps' slices, in tiles (warps, TK, 8), from its parts: a group of columns is
    of one head."""
    STAT: gl.constexpr = gl.SliceLayout(2, GROUPS)
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, STAT)))[:, None, None]
    group = gl.arange(0, TK // GROUP, gl.SliceLayout(0, gl.SliceLayout(2, STAT)))[None, :, None]
    its_row = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, STAT)))[None, None, :]
    TILES: gl.constexpr = K // (WARPS * TK)
    values, tops, sums = (), (), ()
    for tile in gl.static_range(TILES):  # all loads before the first use
        stat = its_row * 2 * SPLITS * HEADS + (tile * WARPS * TK + warp * TK + group * GROUP) // D
        for split in gl.static_range(SPLITS):
            at = VALUES + (row * SPLITS + split) * K + place + tile * WARPS * TK
            values = values + (gl.load(at, mask=(split < used) & (place >= 0), other=0.0),)
            is_part = (split < used_here) & (stat >= 0)
            tops = tops + (gl.load(STATS + stat + split * HEADS, mask=is_part, other=float("-inf")),)
            sums = sums + (gl.load(STATS + stat + (SPLITS + split) * HEADS, mask=is_part, other=0.0),)
    xs = ()
    for tile in gl.static_range(TILES):
        weights, share = _weigh_parts(tops, sums, tile * SPLITS, SPLITS)
        read = gl.zeros([WARPS, TK, 8], gl.float32, B)
        for split in gl.static_range(SPLITS):
            weight = gl.expand_dims(weights[split] * share, 2).broadcast_to([WARPS, TK // GROUP, GROUP, 8])
            weight = gl.convert_layout(weight.reshape([WARPS, TK, 8]), B)  # the same threads have it
            read += values[tile * SPLITS + split].to(gl.float32) * weight
        xs = xs + (read.to(dtype),)
    return xs
