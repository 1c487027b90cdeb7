"""Tiles of matrices, which the copy engine brings into shared memory as far ahead as there is room."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

UNDER_WAY = gl.constexpr(2)  # tiles of a program that are being copied: with more, words of other programs wait


@gluon.constexpr_function
def find_slot(matrix, part, ups):
    """Where in shared memory a tile of a matrix is brought: in some slots two of a layer take turns."""
    if matrix == 5:
        return 4 + max(ups - 1, 1) + part
    if matrix == 4:
        return 3 if part == 1 else 4 + max(part - 1, 0)
    return (part, 3, 0, 1)[matrix]


@gluon.constexpr_function
def _find_turn(matrix, part, ups):
    """Whether a tile is the first or the second of its slot in a layer; -1 if it is the only one."""
    slot = find_slot(matrix, part, ups)
    return int(matrix in (2, 3, 4)) if slot < 2 or (slot == 3 and ups > 1) else -1


@gluon.constexpr_function
def _find_user(matrix, part, ups):
    """Which matrix's tiles were in the tile's slot before, and whether it is of the layer before."""
    if matrix == 4:
        before = 1 if part == 1 else 4
    else:
        before = ((2, 3, 0)[part % 3], 4 if ups > 1 else 1, 0, 0, 4, 5)[matrix]
    return before, before >= matrix


@gluon.constexpr_function
def _list_tiles(ups):
    """Tiles that are copied during a layer (matrix, part, 1 if they are the next layer's), as their slots are left."""
    tiles = [(5, part, 0) for part in range(ups)] + [(2, 0, 0), (3, 0, 0), (0, 2, 1)]
    tiles += [(4, 1, 0)] if ups > 1 else []
    tiles += [(0, 0, 1), (0, 1, 1), (1, 0, 1)]
    return tuple(tiles + [(4, part, 1) for part in range(ups) if part != 1])


@gluon.jit
def _bring_tile(
    MATRIX: gl.constexpr, PART: gl.constexpr, H_TILES, F_TILES, PLACES, layer, slots, ready, used, program,
    H: gl.constexpr, UPS: gl.constexpr,
):  # fmt: skip
    """Have a tile copied once the one before it in its slot has been taken.

    A tile of a matrix with rows of H numbers is eight rows; of the last, whose rows are longer, H columns of eight.
    """
    SLOT: gl.constexpr = find_slot(MATRIX, PART, UPS)
    USER: gl.constexpr = _find_user(MATRIX, PART, UPS)
    OCTETS: gl.constexpr = 3 if MATRIX == 0 else UPS if MATRIX == 4 else 1  # of a program
    begin = gl.load(PLACES + layer * 32 + 12 + MATRIX)
    mbarrier.wait(used[USER[0]], (layer + (1 if USER[1] else 0)) & 1)
    mbarrier.expect(ready[SLOT], 8 * H * 2)
    if MATRIX == 5:
        at = begin + (program * 8 * UPS + PART) * (H // 64)
        tma.async_copy_global_to_shared(F_TILES, [0, at, 0], ready[SLOT], slots.index(SLOT))
    else:
        at = begin + (program * OCTETS + PART) * 8 * (H // 64)
        tma.async_copy_global_to_shared(H_TILES, [0, at, 0], ready[SLOT], slots.index(SLOT))


@gluon.jit
def _bring_next(
    INDEX: gl.constexpr, H_TILES, F_TILES, PLACES, layer, num_layers, slots, ready, used, program,
    H: gl.constexpr, UPS: gl.constexpr,
):  # fmt: skip
    """Have one of a layer's tiles copied once all but one of those before it are there."""
    TILES: gl.constexpr = _list_tiles(UPS)
    TILE: gl.constexpr = TILES[INDEX]
    FORMER: gl.constexpr = TILES[(INDEX - UNDER_WAY) % len(TILES)]
    former = layer + FORMER[2] - (1 if INDEX < UNDER_WAY else 0)
    if former < num_layers:
        wait_for_tile(FORMER[0], FORMER[1], former, ready, UPS)
    if layer + TILE[2] < num_layers:
        _bring_tile(
            TILE[0], TILE[1], H_TILES, F_TILES, PLACES, layer + TILE[2], slots, ready, used, program, H, UPS
        )  # fmt: skip


@gluon.jit
def bring_tiles(
    H_TILES, F_TILES, PLACES, slots, ready, used, program, num_layers, H: gl.constexpr, UPS: gl.constexpr
):  # fmt: skip
    """Have all tiles copied into shared memory."""
    TILES: gl.constexpr = _list_tiles(UPS)
    for index in gl.static_range(len(TILES)):
        if TILES[index][2] == 1:  # of the first layer
            _bring_tile(
                TILES[index][0], TILES[index][1], H_TILES, F_TILES, PLACES, 0, slots, ready, used, program, H, UPS
            )
    for layer in range(num_layers):
        for index in gl.static_range(len(TILES)):
            _bring_next(index, H_TILES, F_TILES, PLACES, layer, num_layers, slots, ready, used, program, H, UPS)


@gluon.jit
def wait_for_tile(MATRIX: gl.constexpr, PART: gl.constexpr, layer, ready, UPS: gl.constexpr):
    turn = layer & 1
    if _find_turn(MATRIX, PART, UPS) >= 0:
        turn = layer * 0 + _find_turn(MATRIX, PART, UPS)
    mbarrier.wait(ready[find_slot(MATRIX, PART, UPS)], turn)
