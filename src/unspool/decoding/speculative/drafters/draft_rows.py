"""Rows as a draft model with another tokenizer reads them: its own tokens, in its own cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from unspool.cache import ROLL_BACK
from unspool.decoding.reader import Reader


class DraftRows:
    """The tokens of every row, and a cache that has read some of them."""

    def __init__(self, open_reader: Callable[[int], Reader], num_rows: int) -> None:
        self._open_reader = open_reader  # with an empty cache for so many rows
        self._reader = open_reader(num_rows)
        self._num_rows = num_rows

    def __len__(self) -> int:
        return self._num_rows

    def find_room(self, num_tokens: int) -> int:
        """The tokens that can be guessed after a row of so many."""
        longest = self._reader.model.info.max_context
        return 0 if num_tokens == 0 else (2**31 if longest is None else max(0, longest - num_tokens))

    def forget(self, unchanged: dict[int, int]) -> None:
        """Roll rows back to the tokens that are what they were, by place; all the way, if the cache holds states, which
        have no tokens that could be taken out."""
        held = self._reader.cache.lengths
        kept = [min(n, unchanged.get(place, n)) for place, n in enumerate(held)]
        if kept == held:
            return
        if ROLL_BACK in self._reader.cache.can:
            self._reader.cache.truncate(kept)
        else:
            self._reader = self._open_reader(self._num_rows)

    def read(self, ids: Sequence[Sequence[int]], places: Sequence[int]) -> torch.Tensor:
        """Read what the cache has not seen of the rows at `places`: logits (rows, vocab) for what follows."""
        held = self._reader.cache.lengths
        chosen = frozenset(places if any(held) else range(self._num_rows))  # a text's beginning is read by all rows
        held = held or [0] * self._num_rows
        new = [list(ids[place][n:]) if place in chosen else [] for place, n in enumerate(held)]
        counts = [len(each) for each in new]
        width = max(counts)
        filled = [[*each, *[0] * (width - len(each))] for each in new]
        tokens = torch.tensor(filled, dtype=torch.int64, device=self._reader.model.device)  # (rows, new)
        return self._reader.read(tokens, counts).logits.float()

    def keep_rows(self, index: Sequence[int]) -> None:
        """Follow the rows that stay."""
        self._reader.keep_rows(index)
        self._num_rows = len(index)
