"""The CPU library: products and whole decoding steps in C, each with a torch equivalent.

`library` finds it, or says why it is missing; `blocks` and `supers` are quantised matrices as rows; `tiles`
lays them out for it by torch's operators, `raw` by the library itself.
"""

from unspool.kernels.cpu.blocks import BLOCK, Blocks, Kind, quantise_rows, read_blocks
from unspool.kernels.cpu.library import Library, find_library, find_marks, why_missing
from unspool.kernels.cpu.raw import (
    AnyRows,
    RawBlocks,
    find_layouts,
    join_rows,
    lay_out,
    quantise,
    read_plain,
    read_stored,
)
from unspool.kernels.cpu.supers import AnyBlocks, AnyKind, SuperBlocks, join_blocks, read_supers
from unspool.kernels.cpu.tables import (
    TABLE_KINDS,
    TableBlocks,
    TableKind,
    quantise_table,
    read_table,
    spread_sizes,
)
from unspool.kernels.cpu.tiles import TILE, pack_tiles, unpack_tiles

__all__ = [
    "BLOCK",
    "TABLE_KINDS",
    "TILE",
    "AnyBlocks",
    "AnyKind",
    "AnyRows",
    "Blocks",
    "Kind",
    "Library",
    "RawBlocks",
    "SuperBlocks",
    "TableBlocks",
    "TableKind",
    "find_layouts",
    "find_library",
    "find_marks",
    "join_blocks",
    "join_rows",
    "lay_out",
    "pack_tiles",
    "quantise",
    "quantise_rows",
    "quantise_table",
    "read_blocks",
    "read_plain",
    "read_stored",
    "read_supers",
    "read_table",
    "spread_sizes",
    "unpack_tiles",
    "why_missing",
]
