"""Several tokens tried after every row of a paged cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from unspool.cache.forked import ForkedCache

if TYPE_CHECKING:
    from unspool.cache.paged import PagedCache


class PagedFork(ForkedCache):
    """Forks of rows in blocks: they lie where what follows the row would."""

    def __init__(self, held: PagedCache, forks: range) -> None:
        super().__init__(held, forks)
        self._paged = held

    def write(self, layer: int, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the forks' keys and values; return those of the rows (rows, heads, keys in view, width)."""
        slots = self.find_slots(self._require_span())
        forks = kv.view(-1, self.num_forks, *kv.shape[2:])  # (rows, forks, 2, heads, width)
        return self._paged.write_forks(layer, forks, slots, self._num_keys)

    def end(self) -> None:
        super().end()
        self._paged.close_forks()

    def _reserve_rows(self, starts: Sequence[int], stops: Sequence[int], stop: int) -> None:  # noqa: ARG002
        self._paged.open_forks(self._first + self.num_forks)

    def _reserve(self, stop: int) -> None:  # noqa: ARG002 - the forks need more room than the longest row's next token
        self._paged.open_forks(self._first + self.num_forks)
