"""Turns of several runs that become one: their rows are stepped together from then on."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Protocol

from unspool.cache import Cache
from unspool.decoding.loop import Turns
from unspool.decoding.reader import Reader


class JoiningTurns(Turns, Protocol):
    """Turns whose rows are stepped with those of other runs: rows come and go between two turns."""

    @property
    def reader(self) -> Reader:
        """What reads the rows."""
        ...

    def share(self) -> None:
        """Called before the first turn: rows of other runs may come. Raises if theirs can't."""
        ...

    def admit(self, others: Sequence[Any], cache: Cache) -> list[int]:
        """Take in the rows of other turns of the kind, after these; `cache` holds the keys of all. The others are used
        up. Returns the number that what was row 0 of each has among these."""
        ...

    def find_places(self, numbers: Collection[int]) -> list[int]:
        """The rows of the cache that rows of the output are written from."""
        ...

    def drop(self, numbers: Collection[int]) -> None:
        """Let rows of the output go before they have ended; not all that there are."""
        ...
