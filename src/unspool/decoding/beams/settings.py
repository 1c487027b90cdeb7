"""What steers a beam search."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

NEVER = -1e9  # the score of a beam that does not exist (yet); what the reference uses, so that ties fall alike

EarlyStopping = bool | Literal["never"]


@dataclass(frozen=True)
class BeamSettings:
    """What steers a beam search."""

    num_beams: int
    num_returned: int
    length_penalty: float
    early_stopping: EarlyStopping
    do_sample: bool
    eos_token_ids: tuple[int, ...]
    max_new_tokens: int
    num_groups: int = 1
    returns_scores: bool = False  # the scores of what is returned are asked for

    @property
    def num_candidates(self) -> int:
        """Continuations looked at a step: enough that `num_beams` go on even if every end token is among them."""
        return self.count_candidates(self.num_beams)

    def count_candidates(self, num_beams: int) -> int:
        """The same for a group of so many beams."""
        return max(2, 1 + len(self.eos_token_ids)) * num_beams

    def score(self, sum_logprobs: float, num_tokens: int) -> float:
        """A hypothesis' score: its log-probability over its length, raised to the penalty."""
        return float(sum_logprobs / num_tokens**self.length_penalty)
