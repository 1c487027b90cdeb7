"""Which rows are done, and why."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unspool.outputs import StepTensors
from unspool.stopping import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
    as_row_flags,
)

_REASONS: tuple[tuple[type, str], ...] = (
    (EosTokenCriteria, "eos"),
    (StopStringCriteria, "stop_string"),
    (MaxLengthCriteria, "length"),
    (MaxTimeCriteria, "time"),
)
_TOLD_BY_TOKEN = (EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria)


class Finish:
    """Asks every stopping criterion about every row, and remembers the first reason."""

    def __init__(self, criteria: StoppingCriteriaList) -> None:
        # What the text says comes before what a limit says, whatever order they were given in.
        ranked = sorted(criteria, key=_rank)
        self._criteria = [(criterion, _reason(criterion)) for criterion in ranked]
        self.has_custom = any(reason == "criteria" for _, reason in self._criteria)
        # End tokens, the length and the time can be told without a look at the history, once the token is known here.
        self.needs_history = any(type(criterion) not in _TOLD_BY_TOKEN for criterion, _ in self._criteria)
        self._ends = frozenset(
            int(token) for one, _ in self._criteria if isinstance(one, EosTokenCriteria) for token in one.eos_token_id
        )
        self.end_tokens = tuple(sorted(self._ends))

    def explain(self, history: torch.Tensor, scores: StepTensors | None) -> list[str | None]:
        """The reason why each row of (rows, width) is done, or None."""
        num_rows = history.shape[0]
        reasons: list[str | None] = [None] * num_rows
        for criterion, reason in self._criteria:
            answer = criterion(history, scores)
            flags = as_row_flags(answer, num_rows, history.device)
            for row in torch.nonzero(flags).flatten().tolist():
                reasons[row] = reasons[row] or reason
        return reasons

    def explain_tokens(self, tokens: Sequence[int], width: int) -> list[str | None]:
        """The same for rows that got a token each and are now `width` columns long, where no history is needed."""
        assert not self.needs_history
        limit: str | None = None
        if self.ends_at(width):
            limit = "length"
        elif any(isinstance(one, MaxTimeCriteria) and one.is_over() for one, _ in self._criteria):
            limit = "time"  # asked once: all rows end together
        return ["eos" if token in self._ends else limit for token in tokens]

    def explain_token(self, token: int, width: int) -> str | None:
        """The same for one row."""
        return self.explain_tokens([token], width)[0]

    def count_left(self, width: int) -> int | None:
        """How many columns more rows of that width may get; None where no length ends them."""
        limits = [one.max_length for one, _ in self._criteria if isinstance(one, MaxLengthCriteria)]
        return max(0, min(limits) - width) if limits else None

    def ends_at(self, width: int) -> bool:
        """Whether all rows are done at that width, whatever their tokens are."""
        return any(isinstance(one, MaxLengthCriteria) and width >= one.max_length for one, _ in self._criteria)


def _reason(criterion: object) -> str:
    return next((reason for kind, reason in _REASONS if isinstance(criterion, kind)), "criteria")


def _rank(criterion: object) -> int:
    order = ("eos", "stop_string", "criteria", "length", "time")
    return order.index(_reason(criterion))
