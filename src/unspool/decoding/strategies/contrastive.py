"""Contrastive search (Su et al., 2022, "A Contrastive Framework for Neural Text Generation").

Of the k likeliest tokens the one is taken whose state is least like any of the past: likelihood less repetition.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from unspool.cache import Cache
from unspool.decoding.readouts.base import Scores
from unspool.decoding.rows import Joining, Rows
from unspool.decoding.scorer import Scorer
from unspool.decoding.strategies.base import Chosen
from unspool.decoding.strategies.candidates import Candidates
from unspool.errors import NoTokenLeftError
from unspool.kernels.contests import Won
from unspool.kernels.sending import send
from unspool.logits.highest import take_highest


class ContrastiveSearch:
    """Reads every row's k likeliest continuations, and takes the best by (1 - α) · probability - α · likeness."""

    reads_choice = True

    def __init__(
        self, scorer: Scorer, candidates: Candidates, *, penalty_alpha: float, top_k: int | Sequence[int]
    ) -> None:
        self.scorer, self._candidates = scorer, candidates
        self._alpha = penalty_alpha
        self._num = top_k if isinstance(top_k, int) else max(top_k)
        self._nums: torch.Tensor | None = None  # (rows, 1): where rows look at different numbers of candidates
        if not isinstance(top_k, int):
            self._nums = torch.tensor(list(top_k))[:, None]

    def step(self, rows: Rows) -> Chosen:
        """Choose every row's next token, and read it: what follows it is known at the next step."""
        self._candidates.remember()
        result = self.scorer.next_logits(rows)
        tokens, weights = self._find_candidates(result)  # (rows, k) each
        if rows.padded:  # what they read is what their sequences get
            tokens = tokens.index_fill(0, send(rows.padded, tokens.device), rows.pad_token_id)
        return Chosen(self._candidates.take(tokens, weights, self._alpha), result.logits)

    def _find_candidates(self, result: Scores) -> tuple[torch.Tensor, torch.Tensor]:
        """The likeliest tokens of every row, and their probabilities; -inf where one may not be taken."""
        won: Won | None = result.epilogue
        if won is not None and self._nums is None:
            return won.tokens, won.weights
        scores, tokens = take_highest(result.scores, self._num)  # (rows, k), falling
        weights = torch.exp(scores - result.scores.logsumexp(dim=-1, keepdim=True))
        is_out = scores == -torch.inf  # what a processor forbids stays forbidden, however new it would be
        if self._nums is not None:
            self._nums = self._nums.to(scores.device)
            is_out |= torch.arange(self._num, device=scores.device) >= self._nums
        return tokens, weights.masked_fill(is_out, -torch.inf)

    @property
    def can_forget(self) -> bool:
        """Whether candidates that were taken can be given up."""
        return self._candidates.can_forget

    def forget(self, num_steps: int) -> None:
        """Undo the last steps, at most two."""
        self._candidates.forget(num_steps)

    def retake(self, rows: Rows) -> None:
        """Take the last step again."""
        self.forget(1)
        rows.drop(1)
        self.step(rows)

    def keep_rows(self, index: list[int]) -> None:
        """Let the cache, the processors and the past states follow rows that stay."""
        self.scorer.keep_rows(index)
        self._candidates.keep_rows(index)
        if self._nums is not None:
            self._nums = self._nums[torch.tensor(index, device=self._nums.device)]

    def admit(self, others: Sequence[Any], cache: Cache, joining: Joining) -> None:
        """Take in rows that are searched in the same way, with their past states."""
        for one in (self, *others):
            is_alike = isinstance(one, ContrastiveSearch) and (one._num, one._alpha) == (self._num, self._alpha)
            if not is_alike or one._nums is not None:
                raise ValueError("rows of contrastive searches that weigh differently can't be chosen by one strategy")
        self.scorer.admit([one.scorer for one in others], cache, joining)
        self._candidates.admit([one._candidates for one in others])

    def explain_no_token(self, rows: Rows, place: int) -> NoTokenLeftError:
        """Why the row at `place` has no token to choose from."""
        return self.scorer.explain_no_token(rows, place)
