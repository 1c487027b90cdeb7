"""Greedy steps under grammars without masks: the likeliest token is the answer if the grammar allows it."""

from __future__ import annotations

from collections.abc import Container, Sequence

import numpy as np
import torch

from unspool.grammar.masks import MaskMaker
from unspool.grammar.states import MatcherState
from unspool.kernels.masks import keep_allowed

MOST_ASKED = 5  # of a row's likeliest tokens, one after the other: a mask costs as much as asking for eight
_NONE = -1  # of all tokens, none


class Chooser:
    """Chooses the next token of every row, step by step, and follows it in the row's state.

    A grammar that takes a row's likeliest token, or one of the next ones, needs no mask. Where it does not, and for end
    tokens, the mask is made, and the likeliest of the allowed tokens is chosen: the same token that scores under masks
    have on top. Where the text must go on in one way, a mask has the one token that the tokenizer would write there,
    though the grammar takes shorter ones too.
    """

    def __init__(self, states: Sequence[MatcherState | None], masks: MaskMaker, num_free: int) -> None:
        self._states = states  # each of one row alone; None for a row that may go on with anything
        self._masks = masks
        self._num_free = num_free  # steps before the text begins
        self._by_mask: Container[int] = frozenset((*masks.ends, *masks.vocabulary.ends))

    def __call__(self, likeliest: list[int], logits: torch.Tensor) -> list[int]:
        """The tokens of the rows, from their likeliest ones and the logits (rows, vocab); -1 where there is none."""
        if self._num_free:
            self._num_free -= 1
            return likeliest
        return [
            token if state is None or token < 0 else self._choose(state, token, logits, row)
            for row, (state, token) in enumerate(zip(self._states, likeliest, strict=True))
        ]

    def _choose(self, state: MatcherState, token: int, logits: torch.Tensor, row: int) -> int:
        if state.is_broken:
            return _NONE
        forced = state.matcher.compute_ff_tokens()
        if forced and forced[0] not in self._by_mask:
            return forced[0] if logits[row, forced[0]] > -np.inf and state.take(forced[0]) else _NONE
        scores: np.ndarray[tuple[int], np.dtype[np.float32]] | None = None
        for _ in range(0 if forced else MOST_ASKED):
            if token in self._by_mask:
                break
            if state.take(token):
                return token
            if scores is None:
                scores = logits[row].numpy().copy()
            scores[token] = -np.inf
            token = int(scores.argmax())
            if not scores[token] > -np.inf:
                return _NONE
        return self._choose_by_mask(state, logits[row : row + 1])

    def _choose_by_mask(self, state: MatcherState, logits: torch.Tensor) -> int:
        kept = keep_allowed(logits, self._masks.make([state], pinned=False)).numpy()[0]
        best = int(np.argmax(kept))
        if not kept[best] > -np.inf:
            return _NONE
        if best not in self._by_mask and not state.take(best):
            state.note(best, was_taken=False)
        return best
