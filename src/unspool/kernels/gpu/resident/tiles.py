"""Tiles of matrices, which the copy engine brings into shared memory as far ahead as there is room.

A tile is eight rows of a matrix, an octet, or so many columns of them as a state has numbers. Octets go round among the
programs. Every tile has its slot of shared memory; in some slots several of a layer take turns.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from unspool.kernels.gpu.resident.vectors import find_first

UNDER_WAY = gl.constexpr(2)  # tiles of a program that are being copied: with more, words of other programs wait
_RING = 8  # slots of a program with several octets of a state


@gluon.constexpr_function
def count_tiles(hidden, inner, programs):
    """How many tiles the program with the most has of each matrix: QKV, out, queries, out, up, down."""
    octets = [-(-outputs // (8 * programs)) for outputs in (3 * hidden, hidden, hidden, hidden, inner, hidden)]
    return (*octets[:5], octets[5] * (inner // hidden))


@gluon.jit
def find_octet(program, turn, PROGRAMS: gl.constexpr):
    """A program's octet of some turn; in every second turn they go round backwards, so that none has all the rest."""
    return turn * PROGRAMS + gl.where(turn % 2 == 0, program, PROGRAMS - 1 - program)


@gluon.constexpr_function
def find_group(matrix, part, counts):
    """Which tiles are used, and so leave their slots, together: a matrix's, or of the last those of an octet."""
    return 5 + part // (counts[5] // counts[1]) if matrix == 5 else matrix


@gluon.constexpr_function
def leaves_early(counts):
    """Whether slots are left as soon as tiles are in registers. With several octets to a program memory decides, and
    slots are few; with one what counts is that copies don't come while words are waited for."""
    return counts[1] > 1


@gluon.constexpr_function
def _plan_slots(counts):
    """All tiles in the order of their use: (matrix, part, slot)."""
    tiles = [(matrix, part) for matrix, count in enumerate(counts) for part in range(count)]
    if leaves_early(counts):
        return tuple((*tile, place % _RING) for place, tile in enumerate(tiles))
    ups = counts[4]
    ends = {(5, part): 4 + max(ups - 1, 1) + part for part in range(ups)}
    ends |= {(4, part): 3 if part == 1 else 4 + max(part - 1, 0) for part in range(ups)}
    ends |= {(1, 0): 3, (2, 0): 0, (3, 0): 1}
    return tuple((*tile, ends.get(tile, tile[1])) for tile in tiles)


@gluon.constexpr_function
def count_slots(counts):
    """How many slots there are."""
    return 1 + max(slot for *_, slot in _plan_slots(counts))


@gluon.constexpr_function
def find_slot(matrix, part, counts):
    """Where in shared memory a tile is brought."""
    return next(slot for *tile, slot in _plan_slots(counts) if tile == [matrix, part])


@gluon.constexpr_function
def _list_users(matrix, part, counts):
    """The tiles of a layer that take turns in a tile's slot, in the order of their use."""
    slot = find_slot(matrix, part, counts)
    return [tuple(tile) for *tile, other in _plan_slots(counts) if other == slot]


@gluon.constexpr_function
def _find_turn(matrix, part, counts):
    """The how manieth of its slot in a layer a tile is, and of how many."""
    users = _list_users(matrix, part, counts)
    return users.index((matrix, part)), len(users)


@gluon.constexpr_function
def _find_user(matrix, part, counts):
    """The group of the tile that was in a tile's slot before, and whether it is of the layer before."""
    users = _list_users(matrix, part, counts)
    turn = users.index((matrix, part))
    return find_group(*users[turn - 1], counts), turn == 0


@gluon.constexpr_function
def _list_tiles(counts):
    """Tiles that are copied during a layer (matrix, part, 1 if they are the next layer's), as their slots are left."""
    if leaves_early(counts):
        tiles = [tile[:2] for tile in _plan_slots(counts)]
        return (*((*tile, 0) for tile in tiles[_RING:]), *((*tile, 1) for tile in tiles[:_RING]))
    ups = counts[4]
    tiles = [(5, part, 0) for part in range(ups)] + [(2, 0, 0), (3, 0, 0), (0, 2, 1)]
    tiles += [(4, 1, 0)] if ups > 1 else []
    tiles += [(0, 0, 1), (0, 1, 1), (1, 0, 1)]
    return tuple(tiles + [(4, part, 1) for part in range(ups) if part != 1])


@gluon.jit
def _bring_tile(
    MATRIX: gl.constexpr, PART: gl.constexpr, TILES, PLACES, layer, slots, ready, used, program,
    H: gl.constexpr, F: gl.constexpr, PROGRAMS: gl.constexpr, COUNTS: gl.constexpr,
):  # fmt: skip
    """Have a tile copied once the one before it in its slot has been taken, if the program has it."""
    SLOT: gl.constexpr = find_slot(MATRIX, PART, COUNTS)
    USER: gl.constexpr = _find_user(MATRIX, PART, COUNTS)
    OUTPUTS: gl.constexpr = 3 * H if MATRIX == 0 else F if MATRIX == 4 else H
    BLOCKS: gl.constexpr = F // H if MATRIX == 5 else 1  # tiles of an octet
    IS_EVEN: gl.constexpr = OUTPUTS % (8 * PROGRAMS) == 0
    begin = gl.load(PLACES + layer * 32 + 12 + MATRIX)
    octet = find_octet(program, PART // BLOCKS, PROGRAMS)
    at = begin + octet * (8 * BLOCKS * H // 64) + PART % BLOCKS * (H // 64)
    mbarrier.wait(used[USER[0]], (layer + (1 if USER[1] else 0)) & 1)
    if IS_EVEN or octet < OUTPUTS // 8:
        mbarrier.expect(ready[SLOT], 8 * H * 2)
        tma.async_copy_global_to_shared(TILES[2 if MATRIX == 5 else 0], [0, at, 0], ready[SLOT], slots[0].index(SLOT))
        if len(slots) > 1:
            at += find_first(H) // 64
            rest = TILES[3 if MATRIX == 5 else 1]
            tma.async_copy_global_to_shared(rest, [0, at, 0], ready[SLOT], slots[1].index(SLOT))
    else:
        mbarrier.arrive(ready[SLOT], count=1)


@gluon.jit
def _bring_next(
    INDEX: gl.constexpr, TILES, PLACES, layer, num_layers, slots, ready, used, program,
    H: gl.constexpr, F: gl.constexpr, PROGRAMS: gl.constexpr, COUNTS: gl.constexpr,
):  # fmt: skip
    """Have one of a layer's tiles copied once all but one of those before it are there."""
    LIST: gl.constexpr = _list_tiles(COUNTS)
    TILE: gl.constexpr = LIST[INDEX]
    FORMER: gl.constexpr = LIST[(INDEX - UNDER_WAY) % len(LIST)]
    former = layer + FORMER[2] - (1 if INDEX < UNDER_WAY else 0)
    if former < num_layers:
        wait_for_tile(FORMER[0], FORMER[1], former, ready, COUNTS)
    if layer + TILE[2] < num_layers:
        _bring_tile(
            TILE[0], TILE[1], TILES, PLACES, layer + TILE[2], slots, ready, used, program, H, F, PROGRAMS, COUNTS
        )  # fmt: skip


@gluon.jit
def bring_tiles(
    TILES, PLACES, slots, ready, used, program, num_layers, H: gl.constexpr, F: gl.constexpr, PROGRAMS: gl.constexpr
):  # fmt: skip
    """Have all tiles copied into shared memory."""
    COUNTS: gl.constexpr = count_tiles(H, F, PROGRAMS)
    LIST: gl.constexpr = _list_tiles(COUNTS)
    for index in gl.static_range(len(LIST)):
        if LIST[index][2] == 1:  # of the first layer
            _bring_tile(
                LIST[index][0], LIST[index][1], TILES, PLACES, 0, slots, ready, used, program, H, F, PROGRAMS, COUNTS
            )
    for layer in range(num_layers):
        for index in gl.static_range(len(LIST)):
            _bring_next(
                index, TILES, PLACES, layer, num_layers, slots, ready, used, program, H, F, PROGRAMS, COUNTS
            )  # fmt: skip


@gluon.jit
def wait_for_tile(MATRIX: gl.constexpr, PART: gl.constexpr, layer, ready, COUNTS: gl.constexpr):
    """Wait until a tile is in its slot."""
    TURN: gl.constexpr = _find_turn(MATRIX, PART, COUNTS)
    mbarrier.wait(ready[find_slot(MATRIX, PART, COUNTS)], (layer * TURN[1] + TURN[0]) & 1)
