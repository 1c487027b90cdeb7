"""Products of a few rows with tiles in shared memory."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mma_v2

from unspool.kernels.gpu.resident.tiles import find_slot, wait_for_tile
from unspool.kernels.gpu.resident.vectors import THREADS, count_all, count_each, count_kinds, gather

# The tensor cores multiply sixteen rows by eight columns. A tile has eight rows, and there are up to four columns: so
# of every four numbers of a row two are taken as one of the eight rows, and two as one of the others, and likewise with
# columns. Then a thread's 16 bytes of a tile are its operand as they are, and no product is made twice; of the sums, a
# thread's first and last count, which belong to one output and one column.


@gluon.constexpr_function
def _lay_tile(warps, columns):
    """How a tile (8, columns / 64, 64) is loaded: as the tensor cores take its columns by warps, 32 of them or more."""
    numbers, lanes = [[0, 0, 1], [0, 0, 2], [0, 0, 4]], [[0, 0, 8], [0, 0, 16], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    apart = [[0, 0, 32]] + [[0, 1 << bit, 0] for bit in range((columns // 64).bit_length() - 1)]
    own = len(apart) - (warps.bit_length() - 1)  # those between a warp's columns
    return gl.DistributedLinearLayout([*numbers, *apart[:own]], lanes, apart[own:], [], [8, columns // 64, 64])


@gluon.constexpr_function
def _lay_rows(warps, columns):
    """How four rows (4, warps, columns), as `keep_rows` stores them, are loaded: as the tensor cores take them."""
    each = 8 if columns >= 64 else 4  # numbers of a thread side by side
    numbers = [[0, 0, 1 << bit] for bit in range(each.bit_length() - 1)]
    numbers += [[0, 0, 64 << bit] for bit in range((columns // 64).bit_length() - 1)]
    lanes = [[0, 0, each], [0, 0, 2 * each], [0, 0, 4 * each], [1, 0, 0], [2, 0, 0]]
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
    """Store rows (COUNT * columns,) in such an order that a thread loads its part of them as 16 bytes, or as 8."""
    TK: gl.constexpr = x.shape[0] // (COUNT * WARPS)
    HALVES: gl.constexpr = 2 if TK >= 64 else 1
    parts = x.reshape([COUNT, WARPS, TK // (32 * HALVES), HALVES, 4, 2, 2, 2]).permute(0, 1, 2, 6, 4, 3, 5, 7)
    room.store(parts.reshape([COUNT, WARPS, TK]))


@gluon.jit
def _take_rows(room, WARPS: gl.constexpr, TK: gl.constexpr, B: gl.constexpr):
    """Four rows as an operand (warps, TK / 2, 8)."""
    HALVES: gl.constexpr = 2 if TK >= 64 else 1
    parts = room.load(_lay_rows(WARPS, TK)).reshape([4, WARPS, TK // (32 * HALVES), 2, 4, HALVES, 2, 2])
    return gl.convert_layout(parts.permute(1, 2, 5, 6, 4, 7, 0, 3).reshape([WARPS, TK // 2, 8]), B, assert_trivial=True)


@gluon.jit
def take_rows(rooms, WARPS: gl.constexpr, B: gl.constexpr):
    """Four rows in shared memory as operands, one for each part of a state."""
    xs = ()
    for part in gl.static_range(len(rooms)):
        xs = xs + (_take_rows(rooms[part], WARPS, rooms[part].shape[2], B),)
    return xs


@gluon.jit
def keep_blocks(xs, rooms, H: gl.constexpr, BLOCKS: gl.constexpr, WARPS: gl.constexpr):
    """Store what threads have of some rows as `take_rows` loads them."""
    for part in gl.static_range(count_kinds(H)):
        _keep_part(xs, rooms[part], part * count_each(H, 0), count_each(H, part), count_all(H), BLOCKS, WARPS)


@gluon.jit
def _keep_part(
    xs, room, FIRST: gl.constexpr, EACH: gl.constexpr, APART: gl.constexpr, BLOCKS: gl.constexpr, WARPS: gl.constexpr
):  # fmt: skip
    x = gather(xs, FIRST, EACH, WARPS)
    if BLOCKS == 2:
        x = gl.join(x, gather(xs, FIRST + APART, EACH, WARPS)).permute(1, 0)
    elif BLOCKS == 4:
        two, three = gather(xs, FIRST + APART, EACH, WARPS), gather(xs, FIRST + 2 * APART, EACH, WARPS)
        four = gather(xs, FIRST + 3 * APART, EACH, WARPS)
        x = gl.join(gl.join(x, three), gl.join(two, four)).permute(1, 2, 0)
    else:
        gl.static_assert(BLOCKS == 1)
    keep_rows(x.reshape([BLOCKS * THREADS * EACH]), room.slice(0, BLOCKS, dim=0), BLOCKS, WARPS)


@gluon.jit
def _multiply_tile(w, xs, WARPS: gl.constexpr, SUMS: gl.constexpr):
    """A tile's products with four rows, for the columns of a warp: (warps, 8 outputs, 4 rows)."""
    total = gl.zeros([WARPS, 16, 8], gl.float32, SUMS)
    for part in gl.static_range(len(xs)):
        total = mma_v2(w[part], xs[part], total)
    one, two = gl.split(total.reshape([WARPS, 2, 8, 4, 2]).permute(0, 2, 3, 1, 4))
    first, _ = gl.split(one)
    _, second = gl.split(two)
    return first + second


@gluon.jit
def take_tiles(
    MATRIX: gl.constexpr, FIRST: gl.constexpr, COUNT: gl.constexpr, layer, slots, ready,
    COUNTS: gl.constexpr, WARPS: gl.constexpr, A: gl.constexpr,
):  # fmt: skip
    """Some of a matrix's tiles as operands of the tensor cores, in parts of a state's numbers."""
    for tile in gl.static_range(FIRST, FIRST + COUNT):
        wait_for_tile(MATRIX, tile, layer, ready, COUNTS)
    ws = ()
    for tile in gl.static_range(FIRST, FIRST + COUNT):
        parts = ()
        for part in gl.static_range(len(slots)):
            slot = slots[part].index(find_slot(MATRIX, tile, COUNTS))
            w = slot.load(_lay_tile(WARPS, slot.shape[1] * slot.shape[2]))
            parts = parts + (_halve_tile(w, WARPS, A),)
        ws = ws + (parts,)
    return ws


@gluon.jit
def add_up(room, OUTPUTS: gl.constexpr, RESULT: gl.constexpr):
    """The sums over warps: (outputs, 4)."""
    return gl.sum(room.slice(0, OUTPUTS, dim=1).load(RESULT), 0)


@gluon.jit
def multiply_blocks(ws, xs, WARPS: gl.constexpr, SUMS: gl.constexpr):
    """Rows times an octet's tiles, one for each row: products are the sums of what is left in four."""
    total = _multiply_tile(ws[0], xs, WARPS, SUMS)
    row = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, total.type.layout)))[None, None, :]
    total = gl.where(row == 0, total, 0.0)  # in rows that are not blocks there may be anything
    for block in gl.static_range(1, len(ws)):
        total = gl.where(row == block, _multiply_tile(ws[block], xs, WARPS, SUMS), total)
    return total


@gluon.jit
def _join_outputs(one, two):
    """Sums (warps, outputs, 4) beside each other."""
    both = gl.join(one, two).permute(0, 3, 1, 2)
    return both.reshape([one.shape[0], 2 * one.shape[1], 4])


@gluon.jit
def store_sums(totals, room):
    """Store octets' sums (warps, 8, 4) beside each other; where their number is no power of two the last stands there
    again."""
    COUNT: gl.constexpr = round_octets(len(totals))
    gl.static_assert(COUNT <= 8)
    for _ in gl.static_range(COUNT - len(totals)):
        totals = totals + (totals[len(totals) - 1],)
    if COUNT == 8:
        totals = (
            _join_outputs(totals[0], totals[1]),
            _join_outputs(totals[2], totals[3]),
            _join_outputs(totals[4], totals[5]),
            _join_outputs(totals[6], totals[7]),
        )
    if len(totals) == 4:
        totals = (_join_outputs(totals[0], totals[1]), _join_outputs(totals[2], totals[3]))
    if len(totals) == 2:
        totals = (_join_outputs(totals[0], totals[1]),)
    room.slice(0, 8 * COUNT, dim=1).store(totals[0])


@gluon.constexpr_function
def round_octets(count):
    """The next power of two."""
    return 1 << (count - 1).bit_length()


@gluon.jit
def multiply_normed(ws, held, room, WARPS: gl.constexpr, B: gl.constexpr, SUMS: gl.constexpr):
    """The products of a state, of its norm's weights and bias with tiles."""
    xs = take_rows(held, WARPS, B)
    totals = ()
    for tile in gl.static_range(len(ws)):
        totals = totals + (_multiply_tile(ws[tile], xs, WARPS, SUMS),)
    store_sums(totals, room)
