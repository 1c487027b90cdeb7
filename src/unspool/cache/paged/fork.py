"""Several tokens tried after every row of a paged cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from unspool.cache.base import Cache
from unspool.cache.views.forked import ForkedCache


class ForkedBlocks(Protocol):
    """Rows in blocks, past whose ends candidates can be written."""

    def open_forks(self, lengths: Sequence[int], count: int) -> None:
        """Make sure that `count` candidates can be written past every row's end."""

    def write_forks(
        self, layer: int, kv: torch.Tensor, positions: torch.Tensor, stop: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store candidates (rows, forks, 2, heads, width) at positions (rows, forks); return the first `stop` keys."""

    def begin_again(self) -> None:
        """Forget where candidates were written: rows are written to again."""


class PagedFork(ForkedCache):
    """Forks of rows in blocks: they lie where what follows the row would."""

    def __init__(self, held: Cache, forks: range, blocks: ForkedBlocks) -> None:
        super().__init__(held, forks)
        self._paged = blocks

    def write(self, layer: int, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the forks' keys and values; return those of the rows (rows, heads, keys in view, width)."""
        slots = self.find_slots(self._require_span())
        forks = kv.view(-1, self.num_forks, *kv.shape[2:])  # (rows, forks, 2, heads, width)
        return self._paged.write_forks(layer, forks, slots, self._num_keys)

    def end(self) -> None:
        super().end()
        self._paged.begin_again()

    def _reserve_rows(self, starts: Sequence[int], stops: Sequence[int], stop: int) -> None:  # noqa: ARG002
        self._paged.open_forks(self._held.lengths, self._first + self.num_forks)

    def _reserve(self, stop: int) -> None:
        self._reserve_rows((), (), stop)
