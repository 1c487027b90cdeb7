"""The best finished hypotheses of one row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from unspool.errors import NoTokenLeftError, SettingError
from unspool.numeric import is_number


class Hypothesis(NamedTuple):
    """A finished sequence with its score per length, and the beams it came by where they are known."""

    score: float
    tokens: torch.Tensor  # (length,)
    beam_indices: Sequence[int] | None


class Ending(NamedTuple):
    """Where a finished hypothesis came from."""

    hypothesis: Hypothesis
    step: int  # how many tokens were written when it was finished, its end token included
    place: int | None  # of its end token among that step's candidates; None if it was running to the last
    beam: int | None  # the beam of its group that it was then
    token: int | None = None  # that ended it, which its score counts; it is not among its tokens


class BeamHypotheses:
    """The `num_beams` best finished hypotheses of a row, or of one group of it."""

    def __init__(
        self, num_beams: int, length_penalty: float, early_stopping: bool | str, max_length: int | None = None
    ) -> None:
        if not isinstance(early_stopping, bool) and early_stopping != "never":
            raise SettingError(f"`early_stopping` must be True, False or 'never', but is {early_stopping!r:.200}.")
        if early_stopping == "never" and max_length is None:
            raise SettingError(
                "`early_stopping='never'` asks what the longest hypothesis could still reach, and `max_length`, "
                "which says how long that is, is not given. Pass `max_length`, or `early_stopping=False`."
            )
        if not is_number(length_penalty):
            raise SettingError(f"`length_penalty` must be a finite number, but is {length_penalty}.")
        self.num_beams = num_beams
        self.length_penalty = length_penalty
        self.early_stopping = early_stopping
        self.max_length = max_length
        self.beams: list[Hypothesis] = []
        self.worst_score = 1e9

    def __len__(self) -> int:
        """How many hypotheses there are."""
        return len(self.beams)

    def add(
        self,
        hyp: torch.Tensor,
        sum_logprobs: float,
        beam_indices: Sequence[int] | None = None,
        generated_len: int | None = None,
    ) -> Hypothesis | None:
        """Keep a finished hypothesis if it is among the best, and return it; without `generated_len` its whole length
        counts."""
        score = self._score(sum_logprobs, hyp.shape[-1] if generated_len is None else generated_len)
        if len(self) >= self.num_beams and score <= self.worst_score:
            return None
        added = Hypothesis(score, hyp, beam_indices)
        self.beams.append(added)
        if len(self) > self.num_beams:
            worst = min(range(len(self)), key=lambda i: self.beams[i].score)  # of equals the oldest goes
            del self.beams[worst]
            self.worst_score = min(hypothesis.score for hypothesis in self.beams)
        else:
            self.worst_score = min(score, self.worst_score)
        return added

    def is_done(self, best_sum_logprobs: float, cur_len: int, decoder_prompt_len: int = 0) -> bool:
        """Whether no hypothesis that is still being written is expected to get in.

        `early_stopping=False` takes the best one as it would score at the current length; `"never"` as it would score
        at the length that suits it best.
        """
        if len(self) < self.num_beams:
            return False
        if self.early_stopping is True:
            return True
        length = cur_len - decoder_prompt_len
        if self.early_stopping == "never" and self.length_penalty > 0.0 and self.max_length is not None:
            length = self.max_length - decoder_prompt_len  # sums of log-probabilities are negative: longer is better
            if length <= 0:
                raise SettingError(
                    f"`max_length` ({self.max_length}) leaves nothing to write after a prompt of "
                    f"{decoder_prompt_len} tokens. Raise it."
                )
        return self.worst_score >= self._score(best_sum_logprobs, length)

    def _score(self, sum_logprobs: float, length: int) -> float:
        """The sum per length, raised to the penalty."""
        try:
            score = sum_logprobs / length**self.length_penalty
        except (ZeroDivisionError, OverflowError) as error:
            raise SettingError(
                f"`length_penalty` ({self.length_penalty}) gives no score to a hypothesis of {length} written tokens."
            ) from error
        if math.isnan(score):
            raise NoTokenLeftError(
                "the score of a hypothesis is NaN: the model's logits are, or the processors left a beam no token (two "
                "settings that force and forbid the same one, say)"
            )
        return float(score)
