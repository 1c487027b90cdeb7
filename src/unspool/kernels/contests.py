"""Contrastive search's candidates, judged where they are read: what a pass is given, and what it returns."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(slots=True, eq=False)
class Contest:
    """Candidates of every row that a pass reads, one of which is to be kept."""

    alpha: float  # what likeness to the past counts against probability
    weights: torch.Tensor  # (rows, candidates) float32: probabilities; -inf where one may not be taken
    past: torch.Tensor  # (rows, room, hidden) float32: directions of the states so far; the kept one's is added

    @property
    def key(self) -> str:
        """What a captured pass is made for: any contest, for all of it is an input."""
        return "contest"

    def fits(self, num_new: int, num_forks: int) -> bool:  # noqa: ARG002 - the protocol's
        """Candidates are judged where they are read as forks of their row."""
        return num_forks > 1

    def judge(self, likeness: torch.Tensor) -> torch.Tensor:
        """The best candidate's place (rows,) by (1 - α) · probability - α · likeness (rows, candidates)."""
        values = (1.0 - self.alpha) * self.weights - self.alpha * likeness
        return values.masked_fill(self.weights == -torch.inf, -torch.inf).argmax(dim=-1)


@dataclass(slots=True)
class Won:
    """How a contest ended, where the pass has decided it; its logits and keys are the kept candidates' then."""

    chosen: torch.Tensor  # (rows,): places of the kept candidates
    tokens: torch.Tensor  # (rows, candidates): the likeliest tokens to follow, falling
    weights: torch.Tensor  # (rows, candidates): their probabilities, as `Contest.weights`
