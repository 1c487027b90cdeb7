"""Several tokens tried after every row, in one pass over one copy of the row's keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from unspool.cache.base import Cache
from unspool.cache.contract.capabilities import RAGGED
from unspool.cache.places import Places
from unspool.cache.span import Mask, Span
from unspool.cache.stores.memory import KeyFormat
from unspool.cache.stores.store import Store
from unspool.errors import SettingError, UnsupportedError


class ForkedCache(Cache):
    """A view of a cache for one pass of one token a fork, `num_forks` forks a row.

    All forks of a row stand at the position that follows it. Fork `j` writes its keys `j` places past the row's end,
    where nothing is held, and sees the row and itself. `keep_fork` of the cache below takes one of them over.
    """

    can = frozenset({RAGGED})
    is_in_order = False

    def __init__(self, held: Cache, forks: range, store: Store, open_forks: Callable[[int], None]) -> None:
        super().__init__()
        self._store, self._open_forks = store, open_forks
        self.num_forks, self.first_fork = len(forks), forks.start
        self._held, self._first = held, forks.start
        self._num_keys = max(held.lengths) + forks.stop  # in view
        self._slots: torch.Tensor | None = None  # (rows, forks): where ragged rows write
        self.lengths = [length for length in held.lengths for _ in forks]

    # --- a forward pass ------------------------------------------------------------------------------
    def begin(
        self,
        rows: int,
        num_new: int,
        counts: Sequence[int] | None = None,
        device: torch.device | str = "cpu",
    ) -> Span:
        if num_new != 1 or (counts is not None and min(counts) != 1):
            raise SettingError(f"a fork is one token, and {num_new} were given")
        self._slots = None
        span = super().begin(rows, 1, None, device)
        self._store.begin(span)
        return span

    def write(self, layer: int, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the forks' keys and values; return those of the rows (rows, heads, keys in view, width)."""
        span, forks = self._require_span(), kv.view(-1, self.num_forks, *kv.shape[2:])
        place = span.starts[0] + self._first if span.is_uniform else None
        return self._store.write_forks(layer, forks, place, self._find_slots, self._num_keys)

    def end(self) -> None:
        self._store.begin(self._require_span())
        super().end()

    def _reserve_rows(self, starts: Sequence[int], stops: Sequence[int], stop: int) -> None:
        self._open_forks(self._first + self.num_forks)

    def _reserve(self, stop: int) -> None:
        self._reserve_rows((), (), stop)

    def _find_slots(self) -> torch.Tensor:
        """Where the forks are written: (rows, forks), found once a pass."""
        if self._slots is None:  # a captured pass, which writes by address, needs none
            span = self._require_span()
            own = torch.arange(self._first, self._first + self.num_forks, device=span.positions.device)
            self._slots = span.positions.view(-1, self.num_forks) + own
        return self._slots

    def places(self, *, in_order: bool = False) -> Places | None:
        """Those of the rows: forks write past their ends."""
        return self._held.places(in_order=in_order)

    def last_places(self) -> Places | None:
        return self._held.last_places()

    def open_layers(self, num_layers: int, rows: int, keys: KeyFormat) -> None:
        self._held.open_layers(num_layers, rows, keys)

    def steady(self) -> AbstractContextManager[Any]:
        return self._held.steady()

    def mask(self, span: Span, window: int | None = None) -> Mask:
        """What each fork sees: (rows * forks, 1, 1, keys), or (forks, 1, 1, keys) if all rows are alike."""
        device = span.positions.device
        column = torch.arange(self._num_keys, device=device)
        own = torch.arange(self._first, self._first + self.num_forks, device=device)[:, None]  # (forks, 1)
        ends = span.positions[: self.num_forks] if span.is_uniform else span.positions  # (rows * forks or forks, 1)
        own = own.repeat(ends.shape[0] // self.num_forks, 1)
        visible = (column < ends) | (column == ends + own)
        if window is not None:
            visible &= (column > ends - window) | (column >= ends)
        return visible[:, None, None, :]

    def key_positions(self, span: Span, window: int | None = None) -> torch.Tensor:  # all are held
        """The position of every key in view, all forks at their row's end: (rows * forks or 1, keys)."""
        ends = span.positions[:1] if span.is_uniform else span.positions
        return torch.arange(self._num_keys, device=ends.device).expand(ends.shape[0], -1).minimum(ends)

    def order_weights(self, weights: torch.Tensor) -> torch.Tensor:
        """Leave each fork (rows * forks, heads, 1, keys) only the columns of positions: the row's and its own."""
        num_positions = max(self._held.lengths) + 1
        rows = len(self._held.lengths)
        column = torch.arange(num_positions, device=weights.device)
        ends = torch.tensor(self._held.lengths, device=weights.device).repeat_interleave(self.num_forks)[:, None]
        own = torch.arange(self._first, self._first + self.num_forks, device=weights.device).repeat(rows)[:, None]
        index = torch.where(column < ends, column, ends + own)  # (rows * forks, positions)
        taken = weights.gather(-1, index[:, None, None].expand(*weights.shape[:-1], -1))
        return taken.masked_fill((column > ends)[:, None, None], 0.0)

    # --- what a view does not do -----------------------------------------------------------------------
    def select_rows(self, index: Sequence[int]) -> None:
        raise UnsupportedError("a fork's rows don't move; keep_fork() of the cache below ends it")

    def _select(self, index: torch.Tensor) -> None:
        self.select_rows(index.tolist())

    def advance(self, rows: int) -> None:
        raise UnsupportedError("a fork is written through begin(), write() and end()")

    def __len__(self) -> int:
        return len(self._held)
