"""The CPU library: products and whole decoding steps in C, each with a torch equivalent.

`library` finds it, or says why it is missing; `blocks` and `supers` are quantised matrices as rows; `tiles`
lays them out for it.
"""

from unspool.kernels.cpu.blocks import BLOCK, Blocks, Kind, quantise_rows, read_blocks
from unspool.kernels.cpu.library import Library, find_library, find_marks, why_missing
from unspool.kernels.cpu.supers import AnyBlocks, AnyKind, SuperBlocks, join_blocks, read_supers
from unspool.kernels.cpu.tiles import TILE, pack_tiles, unpack_tiles

__all__ = [
    "BLOCK",
    "TILE",
    "AnyBlocks",
    "AnyKind",
    "Blocks",
    "Kind",
    "Library",
    "SuperBlocks",
    "find_library",
    "find_marks",
    "join_blocks",
    "pack_tiles",
    "quantise_rows",
    "read_blocks",
    "read_supers",
    "unpack_tiles",
    "why_missing",
]
