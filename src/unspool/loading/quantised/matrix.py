"""One matrix of a quantised checkpoint, whatever the format: its numbers, and the blocks that products read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Final

import torch

from unspool.kernels.cpu.blocks import BLOCK, Blocks, round_halves
from unspool.kernels.cpu.tables import TableBlocks

CHUNK_NUMBERS: Final = 2 << 20  # numbers of a matrix that are made at once


@dataclass(frozen=True, slots=True)
class Codes:
    """Rows of whole numbers: a number is `(value - zero) * scale` of its column's group."""

    values: torch.Tensor  # (rows, columns) int16
    zeros: torch.Tensor  # (rows, groups) int16
    scales: torch.Tensor  # (rows, groups) float32


class QuantisedMatrix(ABC):
    """A matrix (rows, columns) that a checkpoint has as several tensors."""

    shape: tuple[int, int]
    parts: tuple[str, ...]  # the names of those tensors

    @abstractmethod
    def read_rows(self, first: int, end: int) -> torch.Tensor:
        """The numbers of some rows: float32, without a rounding between the stored numbers and these."""

    def find_blocks(self) -> Blocks | TableBlocks | None:
        """The same in the form that products read, 4 or 8 bits; None if there is none so close."""
        return None

    @property
    def rows_at_once(self) -> int:
        """How many rows are read at a time."""
        return max(1, CHUNK_NUMBERS // max(1, self.shape[1]))


@dataclass
class GroupedMatrix(QuantisedMatrix):
    """Whole numbers of 4 or 8 bits, where groups of columns share a scale and a zero."""

    shape: tuple[int, int]
    parts: tuple[str, ...]
    bits: int
    num_groups: int
    group_of: torch.Tensor | None  # (columns,) int64; None: groups of equal size, in order

    @abstractmethod
    def read_codes(self, first: int, end: int) -> Codes:
        """Some rows as they are stored, unpacked."""

    @property
    def _group_size(self) -> int:
        return -(-self.shape[1] // self.num_groups)

    def _spread(self, numbers: torch.Tensor) -> torch.Tensor:
        """Numbers of groups (rows, groups), for each column."""
        if self.group_of is not None:
            return numbers[:, self.group_of]
        return numbers.repeat_interleave(self._group_size, dim=1)[:, : self.shape[1]]

    def read_rows(self, first: int, end: int) -> torch.Tensor:
        """The numbers of some rows."""
        codes = self.read_codes(first, end)
        return (codes.values - self._spread(codes.zeros)).float().mul_(self._spread(codes.scales))

    def _list_block_groups(self) -> torch.Tensor | None:
        """The group of each block of 32 columns; None if some block lies in several."""
        if self.shape[1] % BLOCK or (self.group_of is None and self.num_groups > 1 and self._group_size % BLOCK):
            return None
        if self.group_of is None:
            return torch.arange(0, self.shape[1], BLOCK) // self._group_size
        blocks = self.group_of.view(-1, BLOCK)
        return blocks[:, 0] if bool((blocks == blocks[:, :1]).all()) else None

    def find_blocks(self) -> Blocks | None:
        """The same codes; a scale or a minimum that is no float16 is rounded to one.

        None if groups take columns in another order, for 8 bits whose zeros lead beyond 8 bits, and for scales that
        no float16 is near.
        """
        group = self._list_block_groups()
        if group is None:
            return None
        made: list[Blocks] = []
        for first in range(0, self.shape[0], self.rows_at_once):
            codes = self.read_codes(first, min(first + self.rows_at_once, self.shape[0]))
            scales, zeros = codes.scales[:, group], codes.zeros[:, group]
            part = (
                _pack_four(codes.values, scales, zeros) if self.bits == 4 else _pack_eight(codes.values, scales, zeros)
            )
            if part is None:
                return None
            made.append(part)
        minimums = [part.minimums for part in made if part.minimums is not None]
        return Blocks(
            torch.cat([part.quants for part in made]),
            torch.cat([part.scales for part in made]),
            torch.cat(minimums) if minimums else None,
        )


def _pack_four(values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> Blocks | None:
    halves = round_halves(scales)
    minimums = round_halves(zeros.float().neg_().mul_(scales) + 0.0)  # no zero is negative
    return None if halves is None or minimums is None else Blocks(values.to(torch.uint8), halves, minimums)


def _pack_eight(values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> Blocks | None:
    centred = values.view(values.shape[0], -1, BLOCK) - zeros[..., None]
    halves = round_halves(scales)
    if halves is None or int(centred.min()) < -128 or int(centred.max()) > 127:
        return None
    return Blocks(centred.to(torch.int8).view(values.shape), halves, None)


def split_words(words: torch.Tensor, bits: int) -> torch.Tensor:
    """The numbers of int32 words (…, words), the lowest bits first: (…, words * 32 / bits) int16."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return ((words[..., None] >> shifts) & ((1 << bits) - 1)).flatten(-2).to(torch.int16)


@dataclass
class FloatMatrix(QuantisedMatrix):
    """Floats of 8 bits, of which blocks of rows and columns share a factor."""

    shape: tuple[int, int]
    parts: tuple[str, ...]
    values: torch.Tensor  # (rows, columns) float8_e4m3fn, where the file has them
    scales: torch.Tensor  # (blocks of rows, blocks of columns) float32
    block: tuple[int, int]  # rows and columns that share a factor

    def read_rows(self, first: int, end: int) -> torch.Tensor:
        """The numbers of some rows."""
        rows, columns = self.block
        factors = self.scales[torch.arange(first, end) // rows]
        return self.values[first:end].float().mul_(factors.repeat_interleave(columns, dim=1)[:, : self.shape[1]])
