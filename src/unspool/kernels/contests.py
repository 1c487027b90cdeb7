"""Contrastive search's candidates, ranked inside the pass that reads them: its input and its result."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(slots=True, eq=False)
class Contest:
    """Candidates of every row that a pass reads, one of which is to be kept."""

    alpha: float  # the weight of the degeneration penalty (similarity to the past) against probability
    weights: torch.Tensor  # (rows, candidates) float32: probabilities; -inf for a candidate that may not be chosen
    past: torch.Tensor  # (rows, room, hidden) float32: directions of the states so far; the kept one's is added

    @property
    def key(self) -> str:
        """The key of the captured pass: one serves every contest, because all of it is an input."""
        return "contest"

    def fits(self, num_new: int, num_forks: int) -> bool:  # noqa: ARG002 - the protocol's
        """Whether the pass reads the candidates as forks of their row."""
        return num_forks > 1

    def judge(self, likeness: torch.Tensor) -> torch.Tensor:
        """The best candidate's index (rows,) by (1 - α) · probability - α · likeness (rows, candidates)."""
        values = (1.0 - self.alpha) * self.weights - self.alpha * likeness
        return values.masked_fill(self.weights == -torch.inf, -torch.inf).argmax(dim=-1)


@dataclass(slots=True)
class Won:
    """The result of a contest that the pass has decided; its logits and keys are then those of the kept candidates."""

    taken: torch.Tensor  # (rows, 1): the kept candidates' tokens; -1 where none may be chosen
    tokens: torch.Tensor  # (rows, candidates): the most likely next tokens, in descending order
    weights: torch.Tensor  # (rows, candidates): their probabilities, as `Contest.weights`
