"""Matrices of 4-bit codes that stand for the 16 numbers of a table, as bitsandbytes has them: nf4 and fp4.

The numbers of nf4 are quantiles of a normal distribution (QLoRA, https://arxiv.org/abs/2305.14314); those of fp4 are
floats of a sign, two bits of exponent and one of mantissa. In a file 64 numbers (or another power of two), counted over
the ends of rows, share the largest of their sizes; here every 32 columns of a row have that number beside them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Final, Literal

import torch
import torch.nn.functional as F

from unspool.errors import LoadError
from unspool.kernels.cpu.blocks import BLOCK

TableKind = Literal["nf4", "fp4"]
TABLE_BYTES: Final = 32 + 128  # of a block of a tile: 8 scales, then the codes of 8 rows
_TILE: Final = 8  # rows of a tile
_GROUP: Final = 64  # numbers that share a size, where we quantise
_LEAST_SIZE: Final = 1e-38  # has an inverse
_OUTER_GROUP: Final = 256  # sizes that share a size, if they are quantised too

_TABLES: Final[dict[TableKind, tuple[float, ...]]] = {
    "nf4": (
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ),
    "fp4": tuple(
        sign * size for sign in (1.0, -1.0) for size in (0.0, 1 / 192, 2 / 3, 1.0, 1 / 3, 1 / 2, 1 / 6, 1 / 4)
    ),
}
TABLE_KINDS: Final = tuple(_TABLES)


def read_table(kind: TableKind, device: torch.device | str = "cpu") -> torch.Tensor:
    """The 16 numbers that codes stand for: float32."""
    return torch.tensor(_TABLES[kind], dtype=torch.float32, device=device)


@dataclass(slots=True)
class TableBlocks:
    """A matrix (rows, columns): `value = table[code] * scale`."""

    nibbles: torch.Tensor  # (rows, columns / 2) uint8: the code of an even column in the lower half
    scales: torch.Tensor  # (rows, columns / 32) float32
    kind: TableKind

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.nibbles.shape[0], 2 * self.nibbles.shape[1]

    @property
    def halves(self) -> list[torch.Tensor]:
        """The numbers that the file has beside its codes."""
        return [self.scales]

    def select_rows(self, order: torch.Tensor) -> TableBlocks:
        """The rows in another order."""
        return TableBlocks(self.nibbles[order], self.scales[order], self.kind)

    def dequantise(self) -> torch.Tensor:
        """The dequantised matrix: (rows, columns) float32."""
        codes = torch.stack((self.nibbles & 15, self.nibbles >> 4), dim=2)
        numbers = read_table(self.kind, codes.device)[codes.view(-1, BLOCK).int()]
        return numbers.mul_(self.scales.view(-1, 1)).view(self.shape)


def pack_tables(blocks: TableBlocks) -> torch.Tensor:
    """The bytes of a matrix as the library reads it (csrc/tables.h): (tiles, blocks, bytes) uint8; rows are padded with
    zeros."""
    missing = -blocks.shape[0] % _TILE
    nibbles, scales = blocks.nibbles, blocks.scales
    if missing:
        nibbles, scales = F.pad(nibbles, (0, 0, 0, missing)), F.pad(scales, (0, 0, 0, missing))
    tiles, groups = nibbles.shape[0] // _TILE, scales.shape[1]
    words = nibbles.view(tiles, _TILE, groups, 4, 4).permute(0, 2, 3, 1, 4).reshape(tiles, groups, 128)
    turned = scales.view(tiles, _TILE, groups).transpose(1, 2).contiguous().view(torch.uint8)
    return torch.cat((turned, words), dim=2)


def unpack_tables(packed: torch.Tensor, kind: TableKind, num_rows: int) -> TableBlocks:
    """The blocks that were packed: the inverse of `pack_tables`."""
    tiles, groups, _ = packed.shape
    scales = packed[:, :, :32].contiguous().view(torch.float32).transpose(1, 2).reshape(tiles * _TILE, groups)
    words = packed[:, :, 32:].reshape(tiles, groups, 4, _TILE, 4).permute(0, 3, 1, 2, 4)
    nibbles = words.reshape(tiles * _TILE, groups * 16)
    return TableBlocks(nibbles[:num_rows].contiguous(), scales[:num_rows].contiguous(), kind)


def spread_sizes(sizes: torch.Tensor, group: int, shape: tuple[int, int]) -> torch.Tensor | None:
    """The scales (rows, columns / 32) of a matrix whose numbers have a size for every `group` of them, counted over the
    ends of rows; None where 32 columns would have several."""
    rows, columns = shape
    if columns % BLOCK or group % BLOCK:
        return None
    return sizes.repeat_interleave(group // BLOCK)[: rows * columns // BLOCK].view(rows, -1)


def quantise_table(weight: torch.Tensor, kind: TableKind, *, is_nested: bool) -> TableBlocks:
    """A matrix (rows, columns) as bitsandbytes quantises it: 64 numbers share a size; with `is_nested` sizes are 8-bit
    numbers, 256 of which share one."""
    rows, columns = weight.shape
    if columns % BLOCK:
        raise LoadError(f"{columns} columns are not whole blocks of {BLOCK}")
    missing = -weight.numel() % _GROUP
    flat = F.pad(weight.float().flatten(), (0, missing)).view(-1, _GROUP)
    sizes = flat.abs().amax(1)
    codes = _find_nearest(flat * _invert(sizes)[:, None], kind).flatten()
    codes = codes[: rows * columns].view(rows, -1, 2)
    if is_nested:
        sizes = _round_sizes(sizes)
    scales = spread_sizes(sizes, _GROUP, (rows, columns))
    assert scales is not None
    return TableBlocks(codes[:, :, 0] | (codes[:, :, 1] << 4), scales, kind)


def _invert(sizes: torch.Tensor) -> torch.Tensor:
    return 1 / sizes.clamp(min=_LEAST_SIZE)


def _find_nearest(numbers: torch.Tensor, kind: TableKind) -> torch.Tensor:
    """The codes of the nearest numbers of a table: uint8. In the middle of two the lower one is taken."""
    values, order = read_table(kind, numbers.device).sort(stable=True)
    values, first = values.unique_consecutive(return_inverse=True)
    codes = torch.empty(len(values), dtype=torch.uint8, device=numbers.device)
    codes[first.flip(0)] = order.flip(0).to(torch.uint8)  # of two codes for zero the first one
    return codes[torch.bucketize(numbers, (values[1:] + values[:-1]) / 2)]


def _round_sizes(sizes: torch.Tensor) -> torch.Tensor:
    """Sizes as they are once they were quantised: their distance from their mean, in 8 bits."""
    mean = sizes.mean()
    missing = -len(sizes) % _OUTER_GROUP
    groups = F.pad(sizes - mean, (0, missing)).view(-1, _OUTER_GROUP)
    outer = groups.abs().amax(1, keepdim=True)
    table = _make_dynamic_table().to(sizes.device)
    nearest = torch.bucketize(groups * _invert(outer), (table[1:] + table[:-1]) / 2)
    return (table[nearest] * outer).flatten()[: len(sizes)] + mean


@cache
def _make_dynamic_table() -> torch.Tensor:
    """The 256 numbers of bitsandbytes' dynamic 8-bit type (https://arxiv.org/abs/1511.04561): every power of ten from
    1e-6 to 1 is divided into twice as many parts as the one below."""
    sizes: list[torch.Tensor] = []
    for power in range(7):
        edges = torch.linspace(0.1, 1.0, 2**power + 1)
        sizes.append((edges[:-1] + edges[1:]) / 2 * math.pow(10, power - 6))
    positive = torch.cat(sizes)
    return torch.cat((-positive, torch.tensor([0.0, 1.0]), positive)).sort().values
