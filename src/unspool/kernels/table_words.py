"""Matrices of 4-bit codes of a table (nf4, fp4) as a GPU reads them: words of eight codes, a float32 for every 32."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Final

import torch

from unspool.kernels.cpu import BLOCK, TableBlocks, TableKind, read_table

_IN_WORD: Final = 8


@cache
def _read_table(kind: TableKind, device: torch.device) -> torch.Tensor:
    return read_table(kind, device)


@dataclass(slots=True)
class TableWords:
    """A matrix (rows, columns): `value = table[code] * scale`."""

    words: torch.Tensor  # (rows, columns / 8) int32: the code of the first column in the lowest bits
    scales: torch.Tensor  # (rows, columns / 32) float32
    kind: TableKind

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.words.shape[0], _IN_WORD * self.words.shape[1]

    def read_table(self) -> torch.Tensor:
        """The 16 numbers that codes stand for, on the matrix's device."""
        return _read_table(self.kind, self.words.device)

    def dequantise(self, dtype: torch.dtype) -> torch.Tensor:
        """The dequantised matrix: (rows, columns)."""
        shifts = torch.arange(0, 32, 32 // _IN_WORD, device=self.words.device, dtype=torch.int32)
        codes = (self.words[..., None] >> shifts) & 15
        numbers = self.read_table()[codes.view(-1, BLOCK)]
        return numbers.mul_(self.scales.view(-1, 1)).view(self.shape).to(dtype)


def lay_out_tables(blocks: TableBlocks, device: torch.device) -> TableWords:
    """Blocks as words on a device."""
    return TableWords(
        blocks.nibbles.to(device).contiguous().view(torch.int32), blocks.scales.to(device).contiguous(), blocks.kind
    )
