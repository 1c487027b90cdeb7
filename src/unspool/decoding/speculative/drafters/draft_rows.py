"""Rows as a draft model with another tokenizer reads them: its own tokens, in its own cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unspool.decoding.reader import Reader


class DraftRows:
    """The tokens of every row, and a cache that has read some of them."""

    def __init__(self, reader: Reader, num_rows: int) -> None:
        self._reader = reader
        self._num_rows = num_rows

    def __len__(self) -> int:
        return self._num_rows

    @property
    def can(self) -> frozenset[str]:
        """What the cache can."""
        return self._reader.cache.can

    def find_room(self, num_tokens: int) -> int:
        """The tokens that can be guessed after a row of so many."""
        longest = self._reader.model.info.max_context
        return 0 if num_tokens == 0 else (2**31 if longest is None else max(0, longest - num_tokens))

    def forget(self, unchanged: dict[int, int]) -> None:
        """Roll rows back to the tokens that are what they were, by place."""
        held = self._reader.cache.lengths
        if held:
            kept = [min(n, unchanged.get(place, n)) for place, n in enumerate(held)]
            if kept != held:
                self._reader.cache.truncate(kept)

    def read(self, ids: Sequence[Sequence[int]], places: Sequence[int]) -> torch.Tensor:
        """Read what the cache has not seen of the rows at `places`: logits (rows, vocab) for what follows."""
        held = self._reader.cache.lengths or [0] * self._num_rows
        chosen = frozenset(places)
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
