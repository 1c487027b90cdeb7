"""Prompt lookup with a draft model behind it, which is asked for the rows whose text repeats nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import one_hot, pad

from unspool.decoding.rows import Rows
from unspool.decoding.speculative.drafters.base import Draft, Drafter


class LookupFirst:
    """Guesses by one drafter that costs nothing, and by another for rows where that one finds nothing."""

    is_free = False

    def __init__(self, lookup: Drafter, model: Drafter, most: int) -> None:
        self._lookup = lookup
        self._model = model
        self._most = most  # tokens of a guess by lookup
        self._found: list[bool] = []  # rows whose last guess was found by lookup

    def propose(self, rows: Rows, limits: Sequence[int]) -> Draft:
        """What was found; the model's guesses for the other rows."""
        found = self._lookup.propose(rows, [min(limit, self._most) for limit in limits])
        self._found = [count > 0 for count in found.counts]
        left = [0 if is_found else limit for is_found, limit in zip(self._found, limits, strict=True)]
        if not any(left):
            return found
        guessed = self._model.propose(rows, left)
        return _join(found, guessed) if any(self._found) else guessed

    def observe(self, rows: Rows, draft: Draft, accepted: Sequence[int]) -> None:
        """Pass on to the model what became of its own guesses."""
        if not any(draft.counts):
            self._found = [False] * len(draft.counts)
        counts, right = (
            [0 if is_found else number for is_found, number in zip(self._found, numbers, strict=True)]
            for numbers in (draft.counts, accepted)
        )
        self._model.observe(rows, Draft(draft.tokens, counts, draft.distributions), right)

    def keep_rows(self, index: Sequence[int]) -> None:
        """Follow the rows that stay."""
        self._lookup.keep_rows(index)
        self._model.keep_rows(index)


def _join(found: Draft, guessed: Draft) -> Draft:
    """Both drafts as one; each row has guesses in one of them at most."""
    counts = [max(pair) for pair in zip(found.counts, guessed.counts, strict=True)]
    width = max(counts)
    tokens, others = (pad(draft.tokens, (0, width - draft.tokens.shape[1])) for draft in (found, guessed))
    is_found = torch.tensor([count > 0 for count in found.counts], device=tokens.device)[:, None]
    tokens = torch.where(is_found, tokens, others)
    drawn = guessed.distributions
    if drawn is not None:  # what was found is the only choice that there was
        drawn = pad(drawn, (0, 0, 0, width - drawn.shape[1]))
        drawn = torch.where(is_found[..., None], one_hot(tokens, drawn.shape[-1]).to(drawn.dtype), drawn)
    return Draft(tokens, counts, drawn)
