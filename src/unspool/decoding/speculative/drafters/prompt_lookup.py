"""Prompt lookup: what followed the text's last tokens when they came before (Saxena, 2023)."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from unspool.decoding.rows import Rows
from unspool.decoding.speculative.drafters.base import Draft

NO_TOKEN = -1  # stands between an encoder's text and the decoder's: nothing matches across it


class NgramIndex:
    """The first place after every n-gram of a text that grows: a lookup costs one dictionary access a size."""

    def __init__(self, max_size: int) -> None:
        self._tokens: list[int] = []
        self._first: list[dict[tuple[int, ...], int]] = [{} for _ in range(max_size)]

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens at the text's end."""
        text = self._tokens
        for token in tokens:
            place = len(text)
            # N-grams are entered once something follows them, so that the text's end never finds itself.
            for size, known in enumerate(self._first, start=1):
                if size > place or token == NO_TOKEN:
                    break
                known.setdefault(tuple(text[place - size :]), place)
            text.append(token)

    def find(self, num_tokens: int) -> list[int]:
        """What followed the longest n-gram that the text ends with, at its first place: up to `num_tokens`."""
        text = self._tokens
        for size in range(min(len(self._first), len(text) - 1), 0, -1):
            place = self._first[size - 1].get(tuple(text[-size:]))
            if place is not None:
                return text[place : place + num_tokens]
        return []


class PromptLookup:
    """Drafts by looking the end of each row up in the row itself, and in the encoder's text if there is one."""

    is_free = True

    def __init__(
        self,
        rows: Rows,
        max_size: int,
        ends: Collection[int] = (),
        sources: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self._ends = frozenset((*ends, NO_TOKEN))
        self._indices = [NgramIndex(max_size) for _ in range(len(rows))]
        for place, index in enumerate(self._indices):
            if sources is not None:
                index.extend([*sources[place], NO_TOKEN])
            index.extend(rows.tokens_from(place, 0))
        self._lengths = list(rows.lengths)

    def propose(self, rows: Rows, limits: Sequence[int]) -> Draft:
        """The tokens after the first place that matches, up to an end token."""
        self._catch_up(rows)
        guesses = []
        for index, limit in zip(self._indices, limits, strict=True):
            found = index.find(limit) if limit else []
            last = next((place for place, token in enumerate(found) if token in self._ends), len(found))
            guesses.append(found[:last])
        return Draft.of(guesses, rows.device)

    def observe(self, rows: Rows, draft: Draft, accepted: Sequence[int]) -> None:
        """Nothing: new tokens are entered when somebody looks."""

    def _catch_up(self, rows: Rows) -> None:
        for place, (held, length) in enumerate(zip(self._lengths, rows.lengths, strict=True)):
            if length > held:
                self._indices[place].extend(rows.tokens_from(place, held))
        self._lengths = list(rows.lengths)

    def admit(self, others: Sequence[PromptLookup]) -> None:
        """Take in other lookups' rows, after these; all end in the same tokens."""
        lookups = (self, *others)
        self._indices = [index for one in lookups for index in one._indices]
        self._lengths = [length for one in lookups for length in one._lengths]

    def keep_rows(self, index: Sequence[int]) -> None:
        """Follow the rows that stay."""
        self._indices = [self._indices[i] for i in index]
        self._lengths = [self._lengths[i] for i in index]
