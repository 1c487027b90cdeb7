"""Passes that read and write keys by address: those of every fast path."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from unspool.cache.contract.capabilities import Capable
from unspool.cache.places import Places
from unspool.cache.stores.memory import KeyFormat
from unspool.errors import SettingError, UnsupportedError


class ReadByAddress(Capable):
    """Where keys lie, and steps that write there without `begin`, `write` and `end`."""

    # --- what it stands on -----------------------------------------------------------------------------
    @abstractmethod
    def __len__(self) -> int:
        """Layers that hold keys."""

    @abstractmethod
    def _open_rows(self, starts: Sequence[int], stops: Sequence[int], stop: int) -> None:
        """Check that so many rows fit, and make room for every row from its start to its stop."""

    # --- memory ----------------------------------------------------------------------------------------
    def holds_buffers(self, num_layers: int) -> bool:
        """Whether every layer's buffer is there already, so that a pass only writes into them."""
        return len(self) == num_layers

    def open_layers(self, num_layers: int, rows: int, keys: KeyFormat) -> None:
        """Take the memory of layers that nothing was written to yet, for a pass that writes by address;
        for kinds that take it with the first keys."""

    def make_room(self, rows: int, num_new: int) -> None:
        """Let so many positions past every row's length be written, in a pass that counts none of them."""

    @property
    def longest_stretch(self) -> int | None:
        """Steps that may be taken at once before the cache changes what it holds; None if it never does, 0 if even one
        must be taken alone."""
        return None

    # --- steps -----------------------------------------------------------------------------------------
    def steady(self) -> AbstractContextManager[Any]:
        """Inside it nothing moves that another thread could move: from `places` until a step has been launched."""
        return nullcontext()

    def places(self, *, in_order: bool = False) -> Places | None:  # kinds whose rows read others' keys ask
        """Where the keys lie, for a pass that reads and writes them by address; None for kinds that need `write`.

        With `in_order`, every row's own keys lie in its own row: reordering moves keys, not an index.
        """
        return None

    def last_places(self) -> Places | None:
        """Places to look at and not to read by: what changes from step to step may be older than the last pass."""
        return self.places()

    def advance(self, rows: int) -> None:
        """Make room for one position a row and count it as held: a captured step writes it by address."""
        if type(self).places is ReadByAddress.places:
            raise UnsupportedError(f"a {type(self).__name__} is written through begin(), write() and end()")
        starts = list(self.lengths) or [0] * rows
        if len(starts) != rows:
            raise SettingError(f"the cache holds {len(starts)} rows and the step has {rows}; select_rows() first")
        stops = [start + 1 for start in starts]
        self._open_rows(starts, stops, max(stops))
        self.lengths = stops
