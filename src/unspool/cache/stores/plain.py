"""What holds one layer's keys and values: the unit that caches of mixed layers are put together from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

from unspool.cache.span import Span
from unspool.cache.stores.layout import split
from unspool.cache.stores.ring import Ring

Allocate = Callable[[tuple[int, ...], torch.dtype, torch.device], torch.Tensor]
"""Where a store takes its memory from: zeros of a shape."""


def take_memory(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory on the device itself."""
    return torch.zeros(shape, dtype=dtype, device=device)


class Store(ABC):
    """One layer's keys and values."""

    buffer: torch.Tensor  # (rows, places, 2, heads, width)

    @abstractmethod
    def write(self, span: Span, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store a pass's keys and values (rows, new, 2, heads, width); return all that its queries may see."""

    @abstractmethod
    def select(self, index: torch.Tensor, held: int) -> None:
        """Let rows follow an index; no row has more than `held` positions."""

    @abstractmethod
    def read(self, rows: int, length: int) -> torch.Tensor:
        """What is kept of rows of one length, oldest first, then empty places: (rows, places, 2, heads, width)."""

    @property
    def nbytes(self) -> int:
        """Bytes taken."""
        return self.buffer.nbytes

    def _rows(self, rows: int) -> torch.Tensor:
        return self.buffer if self.buffer.shape[0] == rows else self.buffer.narrow(0, 0, rows)


class PlainStore(Store):
    """Every position at its own place."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self.buffer = buffer

    def write(self, span: Span, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        buffer = self._rows(kv.shape[0])
        if span.is_uniform:
            buffer.narrow(1, span.starts[0], span.num_new).copy_(kv)
        else:
            rows = torch.arange(kv.shape[0], device=kv.device)[:, None]
            buffer.index_put_((rows, span.positions), kv)
        return split(buffer.narrow(1, 0, span.stop))

    def select(self, index: torch.Tensor, held: int) -> None:
        part = self.buffer.narrow(1, 0, held)
        part[: len(index)] = part[index.to(part.device)]

    def read(self, rows: int, length: int) -> torch.Tensor:  # noqa: ARG002 - in order as it lies
        return self._rows(rows)


class RingStore(Store):
    """The last positions, and pinned ones, at the places of a ring."""

    def __init__(self, ring: Ring, buffer: torch.Tensor, *, is_fixed: bool = True) -> None:
        self.ring = ring
        self.buffer = buffer
        self._is_fixed = is_fixed  # the memory stays where it is, for as many rows as it was taken for
        self.tried: list[tuple[torch.Tensor, torch.Tensor]] = []  # what each pass of a trial wrote over, and wrote

    def write(self, span: Span, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ARG002 - the ring knows the places
        ring, buffer = self.ring, self._rows(kv.shape[0])
        if ring.move is None:
            assert ring.place is not None
            buffer.narrow(1, ring.place, 1).copy_(kv)
            return split(buffer.narrow(1, 0, min(ring.held + 1, ring.size)))
        move = ring.move
        if ring.trial is not None:
            self.tried.append((buffer[move.rows, move.places], kv.clone()))
        if ring.is_single:
            buffer.index_put_((move.rows, move.places), kv)
            return split(buffer.narrow(1, 0, min(ring.held + 1, ring.size)))
        # The pass sees its own tokens even where the ring has no place for all of them.
        seen = torch.cat((buffer.narrow(1, 0, ring.held), kv), dim=1) if ring.held else kv
        rows, column = move.is_kept.nonzero(as_tuple=True)
        buffer[rows, move.places[rows, column]] = kv[rows, column]
        return split(seen)

    def restore(self, lengths: torch.Tensor) -> None:
        """Undo what a trial wrote, the last first, and write again what stays below the given lengths (rows, 1)."""
        ring = self.ring
        assert ring.trial is not None
        moves = ring.trial.moves
        for move, (old, _) in zip(reversed(moves), reversed(self.tried), strict=True):
            rows, column = move.is_kept.nonzero(as_tuple=True)
            self.buffer[rows, move.places[rows, column]] = old[rows, column]
        for move, (_, new) in zip(moves, self.tried, strict=True):
            is_last = (move.positions >= lengths - ring.reach) | (move.positions < ring.num_pinned)
            rows, column = (move.is_real & (move.positions < lengths) & is_last).nonzero(as_tuple=True)
            self.buffer[rows, move.places[rows, column]] = new[rows, column]

    def select(self, index: torch.Tensor, held: int) -> None:
        chosen = index.to(self.buffer.device)
        if self._is_fixed:
            part = self.buffer.narrow(1, 0, min(held, self.ring.size))
            part[: len(index)] = part[chosen]
        else:
            self.buffer = self.buffer[chosen]
        self.tried = [(old[chosen], new[chosen]) for old, new in self.tried]

    def read(self, rows: int, length: int) -> torch.Tensor:
        buffer, ring = self._rows(rows), self.ring
        if length <= ring.size:
            return buffer
        pinned, recent = buffer[:, : ring.num_pinned], buffer[:, ring.num_pinned :]
        return torch.cat((pinned, recent.roll(-((length - ring.num_pinned) % ring.reach), dims=1)), dim=1)
