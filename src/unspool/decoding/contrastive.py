"""Contrastive search (Su et al., 2022, "A Contrastive Framework for Neural Text Generation").

Of the k likeliest tokens the one is taken whose state is least like any of the past: likelihood less repetition.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unspool.decoding.rows import Rows
from unspool.decoding.select import NO_TOKEN
from unspool.decoding.step import Scores, Step
from unspool.decoding.strategy import Choice
from unspool.errors import NoTokenLeftError
from unspool.logits.highest import take_highest


class ContrastiveSearch:
    """Reads every row's k likeliest continuations, and takes the best by (1 - α) · probability - α · likeness."""

    def __init__(self, step: Step, *, penalty_alpha: float, top_k: int | Sequence[int]) -> None:
        self._step = step
        self._alpha = penalty_alpha
        self._num = top_k if isinstance(top_k, int) else max(top_k)
        self._nums: torch.Tensor | None = None  # (rows, 1): where rows look at different numbers of candidates
        if not isinstance(top_k, int):
            self._nums = torch.tensor(list(top_k))[:, None]

    def step(self, rows: Rows) -> Choice:
        """Choose every row's next token, and read it: what follows it is known at the next step."""
        result = self._step.next_logits(rows)
        tokens, weights = self._find_candidates(result)  # (rows, k) each
        chosen = self._step.take_candidate(tokens, weights, self._alpha)  # (rows,)
        taken = tokens.gather(1, chosen[:, None])
        return Choice(torch.where(weights[:, :1] > -torch.inf, taken, NO_TOKEN), result.logits)

    def _find_candidates(self, result: Scores) -> tuple[torch.Tensor, torch.Tensor]:
        """The likeliest tokens of every row, and their probabilities; -inf where one may not be taken."""
        if result.won is not None and self._nums is None:
            return result.won.tokens, result.won.weights
        scores, tokens = take_highest(result.scores, self._num)  # (rows, k), falling
        weights = torch.exp(scores - result.scores.logsumexp(dim=-1, keepdim=True))
        is_out = scores == -torch.inf  # what a processor forbids stays forbidden, however new it would be
        if self._nums is not None:
            self._nums = self._nums.to(scores.device)
            is_out |= torch.arange(self._num, device=scores.device) >= self._nums
        return tokens, weights.masked_fill(is_out, -torch.inf)

    def keep_rows(self, index: list[int]) -> None:
        """Let the step follow rows that stay."""
        self._step.keep_rows(index)
        if self._nums is not None:
            self._nums = self._nums[torch.tensor(index, device=self._nums.device)]

    def explain_no_token(self, rows: Rows, place: int) -> NoTokenLeftError:
        """Why the row at `place` has no token to choose from."""
        return self._step.explain_no_token(rows, place)
