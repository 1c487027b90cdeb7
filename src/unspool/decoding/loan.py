"""A caller's cache in a call: what it takes to give it back as it was, should the call fail."""

from __future__ import annotations

from unspool.cache import ROLL_BACK, Cache


class Loan:
    """A cache before a call. Where keys stay until a length is lowered, lengths say it all; others are copied."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._lengths = list(cache.lengths)
        can_return = ROLL_BACK in cache.can and cache.rolls_back_exactly and bool(cache.lengths)
        self._copy = None if can_return else cache.clone()

    def give_back(self) -> None:
        """Undo what the call did to the cache."""
        cache = self._cache
        if self._copy is not None:
            cache.return_to(self._copy)
            return
        copies = len(cache.lengths) // len(self._lengths)
        if copies > 1:  # prompts that were continued more than once have a row for each
            cache.select_rows([row * copies for row in range(len(self._lengths))])
        cache.truncate(self._lengths)
