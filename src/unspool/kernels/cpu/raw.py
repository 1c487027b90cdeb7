"""Rows that become a quantised matrix, as they are read: the library lays them out in one call.

Without the library, or for another device, they become plain blocks by torch's operators, which give the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, cast

import torch

from unspool.errors import LoadError
from unspool.kernels.cpu.blocks import BLOCK, Blocks, Kind, quantise_rows, read_blocks
from unspool.kernels.cpu.library import Library, find_library
from unspool.kernels.cpu.structures import CRows
from unspool.kernels.cpu.supers import (
    SUPER_KINDS,
    AnyBlocks,
    AnyKind,
    SuperBlocks,
    count_columns,
    join_blocks,
    read_supers,
)
from unspool.kernels.cpu.tables import TableBlocks
from unspool.kernels.cpu.tiles import pack_tiles

Stored = Literal["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"]
_FORMS: Final = ("codes", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")  # us_form
_KINDS: Final[dict[str, AnyKind]] = {
    "Q8_0": "int8",
    "Q4_0": "int4",
    "Q4_1": "int4",
    "Q5_0": "q5",
    "Q5_1": "q5",
    **SUPER_KINDS,
}
_BYTES: Final = {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24, "Q4_K": 144, "Q5_K": 176, "Q6_K": 210}
_HAS_NAN, _OVERFLOWS = 1, 2  # us_scan


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of one origin: a file's bytes (rows, bytes), or plain blocks."""

    source: torch.Tensor | AnyBlocks
    stored: Stored = "Q8_0"  # what the file's bytes are

    @property
    def num_rows(self) -> int:
        """How many rows there are."""
        return self.source.shape[0]

    def read(self, kind: AnyKind, columns: int) -> AnyBlocks:
        """Plain blocks, by torch's operators."""
        if not isinstance(self.source, torch.Tensor):
            return self.source
        raw, shape = self.source.flatten(), (self.num_rows, columns)
        is_plain = kind in ("int8", "int4")
        found = read_blocks(raw, self.stored, shape) if is_plain else read_supers(raw, self.stored, shape)
        assert found is not None and found.kind == kind
        return found

    def describe(self) -> tuple[CRows, list[torch.Tensor]]:
        """The C struct, and what it points at."""
        source, form = self.source, "codes"
        assert not isinstance(source, TableBlocks)  # laid out by torch's operators
        if isinstance(source, SuperBlocks):
            kept = [source.codes, source.headers]
        elif isinstance(source, Blocks):
            kept = [source.quants, *source.halves]
        else:
            kept, form = [source], self.stored
        kept = [tensor.contiguous() for tensor in kept]
        places = [tensor.data_ptr() for tensor in kept]
        return CRows(_FORMS.index(form), self.num_rows, *places, *[None] * (3 - len(places))), kept


@dataclass(frozen=True, slots=True)
class RawBlocks:
    """A quantised matrix that is not laid out yet: parts one below the other, whose rows come in an order."""

    parts: tuple[Part, ...]
    kind: AnyKind
    columns: int
    order: torch.Tensor | None = None  # (rows,) int64

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self._num_own if self.order is None else len(self.order), self.columns

    @property
    def _num_own(self) -> int:
        return sum(part.num_rows for part in self.parts)

    def select_rows(self, order: torch.Tensor) -> RawBlocks:
        """The rows in another order."""
        if len(order) and not 0 <= int(order.min()) <= int(order.max()) < self.shape[0]:
            raise LoadError(f"rows from {int(order.min())} to {int(order.max())} of a matrix of {self.shape[0]}")
        return RawBlocks(self.parts, self.kind, self.columns, order if self.order is None else self.order[order])

    def read(self) -> AnyBlocks:
        """Plain blocks, by torch's operators."""
        joined = join_blocks([part.read(self.kind, self.columns) for part in self.parts])
        return joined if self.order is None else joined.select_rows(self.order)

    def lay_out(self, library: Library) -> torch.Tensor:
        """The bytes that `pack_tiles` makes of them."""
        described = [part.describe() for part in self.parts]
        rows = (CRows * len(described))(*(struct for struct, _ in described))
        order = None if self.order is None else self.order.contiguous()
        return library.lay_out_rows(rows, order, self.shape, self.kind)


AnyRows = AnyBlocks | RawBlocks


def find_layouts() -> Library | None:
    """The library, if there is one that lays matrices out."""
    library = find_library()
    return library if library is not None and library.lays_out else None


def read_stored(library: Library, raw: torch.Tensor, stored: str, shape: tuple[int, ...]) -> RawBlocks | None:
    """A GGUF tensor's own blocks, of the kind that `read_supers` or `read_blocks` finds; None for formats that have
    none. NaN among its float16 is a FloatingPointError.

    `raw` are the tensor's bytes. Matrices that are stored as one tensor of three dimensions stand one below the other.
    """
    kind = _KINDS.get(stored)
    if len(shape) == 3:
        shape = (shape[0] * shape[1], shape[2])
    if kind is None or len(shape) != 2 or not math.prod(shape) or shape[1] % count_columns(kind):
        return None
    found = library.scan_rows(raw, _FORMS.index(stored), raw.numel() // _BYTES[stored])
    if found & _HAS_NAN:
        raise FloatingPointError(f"a float16 of these {stored} blocks is NaN")
    if found & _OVERFLOWS:
        if stored == "Q5_1":
            return None
        kind = "int8" if stored == "Q5_0" else kind
    return RawBlocks((Part(raw.view(shape[0], -1), cast(Stored, stored)),), kind, shape[1])


def quantise(weight: torch.Tensor, kind: Kind) -> Blocks:
    """The nearest blocks to a matrix of numbers (rows, columns), as `quantise_rows` rounds them."""
    library = find_layouts()
    if library is None or weight.device.type != "cpu" or weight.shape[1] % BLOCK:
        return quantise_rows(weight, kind)
    return library.quantise_rows(weight.float().contiguous(), kind)


def read_plain(blocks: AnyRows) -> AnyBlocks:
    """The same as plain blocks."""
    return blocks.read() if isinstance(blocks, RawBlocks) else blocks


def join_rows(parts: Sequence[AnyRows]) -> AnyRows:
    """Matrices of one kind, one below the other."""
    kinds = {part.kind for part in parts}
    if len(parts) == 1:
        return parts[0]
    if len(kinds) > 1 or not any(isinstance(part, RawBlocks) for part in parts):
        return join_blocks([read_plain(part) for part in parts])
    own: list[Part] = []
    for part in parts:
        if isinstance(part, RawBlocks) and part.order is None:
            own += part.parts
        else:
            own.append(Part(read_plain(part)))
    return RawBlocks(tuple(own), parts[0].kind, parts[0].shape[1])


def lay_out(blocks: AnyRows) -> torch.Tensor:
    """The bytes of a matrix as the library reads it: (tiles, blocks, bytes) uint8; rows are padded with zeros."""
    library = find_layouts()
    if library is None or isinstance(blocks, TableBlocks):
        return pack_tiles(read_plain(blocks))
    if not isinstance(blocks, RawBlocks):
        blocks = RawBlocks((Part(blocks),), blocks.kind, blocks.shape[1])
    return blocks.lay_out(library)
