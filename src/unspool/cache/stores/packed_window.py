"""A sliding layer's keys and values in few bits: whole blocks leave when no query can see them any more.

Each row counts its indices from a base of its own, a multiple of a block. Attention asks only how far a key is from a
query, so it reads a window as it reads everything: with the base taken from both positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from unspool.cache.span import Span
from unspool.cache.stores.memory import Allocate
from unspool.cache.stores.packed_layer import LayerBlocks, PackedRun, Pending
from unspool.errors import UnsupportedError
from unspool.kernels.packing import Fit, Packed, Scheme


@dataclass(slots=True)
class _PendingWindow(Pending):
    """What a long pass leaves of a window; the old one is still read."""

    keys: Packed
    values: Packed
    cuts: list[int]  # how far each row's base moves


class WindowBlocks(LayerBlocks):
    """The packed blocks that a window still reaches, and each row's recent positions."""

    def __init__(
        self,
        schemes: tuple[Scheme, Scheme],
        fit: Fit,
        residual_length: int,
        num_places: int,
        recent: torch.Tensor,
        take: Allocate,
        window: int,
    ) -> None:
        super().__init__(schemes, fit, residual_length, num_places, recent, take)
        self.window = window

    # --- a pass --------------------------------------------------------------------------------------
    def reserve(self, num_places: int, num_slots: int) -> None:
        """Nothing to do: a window takes its memory once."""

    def write(self, span: Span, kv: torch.Tensor, columns: torch.Tensor | None = None) -> torch.Tensor:
        return super().write(replace(span, starts=self._count(span.starts)), kv, columns)

    def _pack_ahead(
        self, seen: torch.Tensor, lengths: Sequence[int], targets: list[int], tail: torch.Tensor
    ) -> Pending:
        cuts = self._find_cuts(lengths, targets)
        rows, heads = seen.shape[0], seen.shape[3]
        fresh = [
            Packed.empty(packed.scheme, rows, heads, packed.num_positions, seen.device)
            for packed in (self.keys, self.values)
        ]
        runs = []
        for row, (held, target, cut) in enumerate(zip(self.num_packed, targets, cuts, strict=True)):
            for old, new in zip((self.keys, self.values), fresh, strict=True):
                _copy_blocks(old, cut, new, row, held - cut)
            first = max(held, cut)
            runs.append(PackedRun(first - held, first - cut, target - first))
        self._pack(seen, runs, (fresh[0], fresh[1]))
        left = [target - cut for target, cut in zip(targets, cuts, strict=True)]
        return _PendingWindow(left, tail, fresh[0], fresh[1], cuts)

    def settle(self, lengths: Sequence[int]) -> None:
        if isinstance(self._pending, _PendingWindow):
            pending, rows = self._pending, slice(0, len(lengths))
            self.keys.rows(rows).copy_(pending.keys)
            self.values.rows(rows).copy_(pending.values)
            self.bases = [base + cut for base, cut in zip(self.bases, pending.cuts, strict=True)]
            self.num_packed = pending.num_packed
        near = self._count(lengths)
        targets = self.find_targets(near)
        if max(targets, default=0) > self.keys.num_positions:
            self._slide(self._find_cuts(near, self.num_packed))
        super().settle(self._count(lengths))

    def is_overdue(self, lengths: Sequence[int]) -> bool:
        return super().is_overdue(self._count(lengths))

    def _count(self, lengths: Sequence[int]) -> list[int]:
        """Positions by the rows' own indices."""
        return [length - base for length, base in zip(lengths, self.bases, strict=True)]

    def _find_cuts(self, lengths: Sequence[int], most: Sequence[int]) -> list[int]:
        """How far each row's base can move: what is before no query sees again, even after one position is undone."""
        block = self.block
        return [
            max(0, min(packed, (length - self.window) // block * block))
            for length, packed in zip(lengths, most, strict=True)
        ]

    def _slide(self, cuts: Sequence[int]) -> None:
        for row, (held, cut) in enumerate(zip(self.num_packed, cuts, strict=True)):
            if cut:
                for packed in (self.keys, self.values):
                    _copy_blocks(packed, cut, packed, row, held - cut)
                self.bases[row] += cut
                self.num_packed[row] -= cut

    # --- rows ----------------------------------------------------------------------------------------
    def check_truncation(self, lengths: Sequence[int]) -> None:
        """Raise if a row is to go back to what was let go."""
        for row, (length, base) in enumerate(zip(lengths, self.bases, strict=True)):
            if base and 0 < length < base + self.window - 1:
                raise UnsupportedError(
                    f"row {row} can't roll back to {length} positions: a window of {self.window} let go what is before "
                    f"position {base}. Call begin_trial() before tokens that may have to go, or keep every key with "
                    "cache_implementation='quantized'"
                )

    def truncate(self, lengths: Sequence[int]) -> None:
        for row, length in enumerate(lengths):
            if length == 0:
                self.bases[row] = self.num_packed[row] = 0
        super().truncate(self._count(lengths))


def _copy_blocks(source: Packed, first: int, target: Packed, row: int, length: int) -> None:
    """Copy one row's blocks from `first` on to the beginning; source and target may be the same."""
    if length > 0:
        blocks, room = source.narrow(first, length), target.narrow(0, length)
        for old, new in zip(blocks.tensors(), room.tensors(), strict=True):
            new[row] = old[row].clone()
