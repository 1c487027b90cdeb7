"""Blocks laid out for the library: tiles of 8 rows, groups of 4 columns, as csrc/tiles.h describes them."""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F

from unspool.kernels.cpu.blocks import BLOCK, Blocks
from unspool.kernels.cpu.supers import (
    SUPER_BYTES,
    AnyBlocks,
    AnyKind,
    SuperBlocks,
    count_columns,
    pack_supers,
    unpack_supers,
)
from unspool.kernels.cpu.tables import TABLE_BYTES, TableBlocks, pack_tables, unpack_tables

TILE: Final = 8  # rows that are multiplied together
_BYTES: Final[dict[str, int]] = {"int8": 16 + 256, "int4": 32 + 128}  # of one block of one tile


def count_tile_bytes(kind: AnyKind, rows: int, columns: int) -> int | None:
    """The bytes of a matrix of that shape; None if its columns are not whole blocks."""
    if kind == "int8" or kind == "int4":
        width, size = BLOCK, _BYTES[kind]
    elif kind == "nf4" or kind == "fp4":
        width, size = BLOCK, TABLE_BYTES
    else:
        width, size = count_columns(kind), TILE * SUPER_BYTES[kind]
    return None if columns % width else -(-rows // TILE) * (columns // width) * size


def pack_tiles(blocks: AnyBlocks) -> torch.Tensor:
    """The bytes of a matrix as the library reads it: (tiles, blocks, bytes) uint8; rows are padded with zeros."""
    if isinstance(blocks, SuperBlocks):
        return pack_supers(blocks)
    if isinstance(blocks, TableBlocks):
        return pack_tables(blocks)
    quants, missing = blocks.quants, -blocks.quants.shape[0] % TILE
    if missing:
        quants = F.pad(quants, (0, 0, 0, missing))
    num_tiles, num_blocks = quants.shape[0] // TILE, quants.shape[1] // BLOCK
    parts = [_pack_halves(blocks.scales, missing)]
    if blocks.minimums is None:
        groups = quants.view(num_tiles, TILE, num_blocks, 8, 4).permute(0, 2, 3, 1, 4)
        parts.append(groups.reshape(num_tiles, num_blocks, 256).view(torch.uint8))
    else:
        parts.append(_pack_halves(blocks.minimums, missing))
        halves = quants.view(num_tiles, TILE, num_blocks, 2, 4, 4).permute(3, 0, 2, 4, 1, 5)
        parts.append((halves[0] | (halves[1] << 4)).reshape(num_tiles, num_blocks, 128))
    return torch.cat(parts, dim=2)


def _pack_halves(values: torch.Tensor, missing: int) -> torch.Tensor:
    """A float16 for each of a tile's rows: (tiles, blocks, 16) uint8."""
    filled = F.pad(values, (0, 0, 0, missing)) if missing else values
    return filled.view(-1, TILE, filled.shape[1]).transpose(1, 2).contiguous().view(torch.uint8)


def unpack_tiles(packed: torch.Tensor, kind: AnyKind, num_rows: int) -> AnyBlocks:
    """The blocks that were packed: the inverse of `pack_tiles`."""
    if kind == "nf4" or kind == "fp4":
        return unpack_tables(packed, kind, num_rows)
    if kind != "int8" and kind != "int4":
        return unpack_supers(packed, kind, num_rows)
    num_tiles, num_blocks, _ = packed.shape
    scales = _unpack_halves(packed[:, :, :16])[:num_rows]
    if kind == "int8":
        groups = packed[:, :, 16:].view(torch.int8).reshape(num_tiles, num_blocks, 8, TILE, 4).permute(0, 3, 1, 2, 4)
        return Blocks(groups.reshape(num_tiles * TILE, -1)[:num_rows], scales, None)
    both = packed[:, :, 32:].reshape(num_tiles, num_blocks, 1, 4, TILE, 4)
    groups = torch.cat((both & 15, both >> 4), dim=2).permute(0, 4, 1, 2, 3, 5)
    minimums = _unpack_halves(packed[:, :, 16:32])[:num_rows]
    return Blocks(groups.reshape(num_tiles * TILE, -1)[:num_rows], scales, minimums)


def _unpack_halves(part: torch.Tensor) -> torch.Tensor:
    values = part.contiguous().view(torch.float16)  # (tiles, blocks, 8)
    return values.transpose(1, 2).reshape(-1, part.shape[1])
