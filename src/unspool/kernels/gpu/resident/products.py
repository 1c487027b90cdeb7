"""Products of a few rows with tiles in shared memory."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mma_v2

from unspool.kernels.gpu.resident.tiles import find_slot, wait_for_tile

# The tensor cores multiply sixteen rows by eight columns. A tile has eight rows, and there are up to four columns: so
# of every four numbers of a row two are taken as one of the eight rows, and two as one of the others, and likewise with
# columns. Then a thread's 16 bytes of a tile are its operand as they are, and no product is made twice; of the sums, a
# thread's first and last count, which belong to one output and one column.


@gluon.constexpr_function
def _lay_tile(warps, columns):
    """How a tile (8, columns / 64, 64) is loaded: as the tensor cores take its columns by warps."""
    each = columns // 64 // warps  # chunks of a warp, if it has whole ones
    numbers = [[0, 0, 1], [0, 0, 2], [0, 0, 4]]
    numbers += [[0, 0, 32]] + [[0, 1 << bit, 0] for bit in range(each.bit_length() - 1)]
    lanes = [[0, 0, 8], [0, 0, 16], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    warp_bases = [[0, each << bit, 0] for bit in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(numbers, lanes, warp_bases, [], [8, columns // 64, 64])


@gluon.constexpr_function
def _lay_rows(warps, columns):
    """How four rows (4, warps, columns), as `keep_rows` stores them, are loaded: as the tensor cores take them."""
    numbers = [[0, 0, 1], [0, 0, 2], [0, 0, 4]] + [[0, 0, 64 << bit] for bit in range((columns // 64).bit_length() - 1)]
    lanes = [[0, 0, 8], [0, 0, 16], [0, 0, 32], [1, 0, 0], [2, 0, 0]]
    warp_bases = [[0, 1 << bit, 0] for bit in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(numbers, lanes, warp_bases, [], [4, warps, columns])


@gluon.jit
def _halve_tile(w, WARPS: gl.constexpr, A: gl.constexpr):
    """A tile (8, chunks, 64) as an operand (warps, 16, H / warps / 2)."""
    TK: gl.constexpr = w.shape[1] * w.shape[2] // WARPS
    parts = w.reshape([8, WARPS, TK // 32, 4, 2, 2, 2]).permute(1, 5, 0, 2, 4, 3, 6)
    return gl.convert_layout(parts.reshape([WARPS, 16, TK // 2]), A, assert_trivial=True)


@gluon.jit
def keep_rows(x, room, COUNT: gl.constexpr, WARPS: gl.constexpr):
    """Store rows (COUNT * H,) in such an order that a thread loads its part of them as 16 bytes."""
    TK: gl.constexpr = x.shape[0] // (COUNT * WARPS)
    parts = x.reshape([COUNT, WARPS, TK // 64, 2, 4, 2, 2, 2]).permute(0, 1, 2, 6, 4, 3, 5, 7)
    room.store(parts.reshape([COUNT, WARPS, TK]))


@gluon.jit
def _take_rows(room, WARPS: gl.constexpr, TK: gl.constexpr, B: gl.constexpr):
    """Four rows as an operand (warps, TK / 2, 8)."""
    parts = room.load(_lay_rows(WARPS, TK)).reshape([4, WARPS, TK // 64, 2, 4, 2, 2, 2]).permute(1, 2, 5, 6, 4, 7, 0, 3)
    return gl.convert_layout(parts.reshape([WARPS, TK // 2, 8]), B, assert_trivial=True)


@gluon.jit
def _multiply_tile(w, rows, WARPS: gl.constexpr, SUMS: gl.constexpr):
    """A tile's products with four rows, for the columns of a warp: (warps, 8 outputs, 4 rows)."""
    total = mma_v2(w, rows, gl.zeros([WARPS, 16, 8], gl.float32, SUMS))
    one, two = gl.split(total.reshape([WARPS, 2, 8, 4, 2]).permute(0, 2, 3, 1, 4))
    first, _ = gl.split(one)
    _, second = gl.split(two)
    return first + second


@gluon.jit
def take_tiles(
    MATRIX: gl.constexpr, FIRST: gl.constexpr, COUNT: gl.constexpr, layer, slots, ready,
    H: gl.constexpr, UPS: gl.constexpr, WARPS: gl.constexpr, A: gl.constexpr,
):  # fmt: skip
    """Some of a matrix's tiles as operands of the tensor cores."""
    TILE: gl.constexpr = _lay_tile(WARPS, H)
    for part in gl.static_range(FIRST, FIRST + COUNT):
        wait_for_tile(MATRIX, part, layer, ready, UPS)
    ws = ()
    for part in gl.static_range(FIRST, FIRST + COUNT):
        ws = ws + (_halve_tile(slots.index(find_slot(MATRIX, part, UPS)).load(TILE), WARPS, A),)
    return ws


@gluon.jit
def add_up(room, OUTPUTS: gl.constexpr, RESULT: gl.constexpr):
    """The sums over warps: (outputs, 4)."""
    return gl.sum(room.slice(0, OUTPUTS, dim=1).load(RESULT), 0)


@gluon.jit
def multiply_blocks(
    ws, rows, room, H: gl.constexpr, WARPS: gl.constexpr, B: gl.constexpr, SUMS: gl.constexpr
):  # fmt: skip
    """Rows of shared memory times tiles, one for H columns each: products are the sums of what is left in four."""
    x = _take_rows(rows, WARPS, H // WARPS, B)
    total = _multiply_tile(ws[0], x, WARPS, SUMS)
    row = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, total.type.layout)))[None, None, :]
    total = gl.where(row == 0, total, 0.0)  # in rows that are not blocks there may be anything
    for block in gl.static_range(1, len(ws)):
        total = gl.where(row == block, _multiply_tile(ws[block], x, WARPS, SUMS), total)
    room.store(total)


@gluon.jit
def _multiply_tiles(ws, x, WARPS: gl.constexpr, SUMS: gl.constexpr):
    totals = ()
    for tile in gl.static_range(len(ws)):
        totals = totals + (_multiply_tile(ws[tile], x, WARPS, SUMS),)
    return totals


@gluon.jit
def _join_outputs(one, two):
    """Sums (warps, outputs, 4) beside each other."""
    both = gl.join(one, two).permute(0, 3, 1, 2)
    return both.reshape([one.shape[0], 2 * one.shape[1], 4])


@gluon.jit
def multiply_normed(
    ws, held, room, H: gl.constexpr, WARPS: gl.constexpr, B: gl.constexpr, SUMS: gl.constexpr
):  # fmt: skip
    """The products of a state, of its norm's weights and bias with tiles."""
    totals = _multiply_tiles(ws, _take_rows(held, WARPS, H // WARPS, B), WARPS, SUMS)
    if len(ws) == 1:
        room.store(totals[0])
    elif len(ws) == 2:
        room.store(_join_outputs(totals[0], totals[1]))
    else:  # the last of three stands there twice
        low, high = _join_outputs(totals[0], totals[1]), _join_outputs(totals[2], totals[len(ws) - 1])
        room.store(_join_outputs(low, high))
