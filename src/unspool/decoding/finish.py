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
_LOOK_AT_LAST = (EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria)


class Finish:
    """Asks every stopping criterion about every row, and remembers the first reason."""

    def __init__(self, criteria: StoppingCriteriaList) -> None:
        # What the text says comes before what a limit says, whatever order they were given in.
        ranked = sorted(criteria, key=_rank)
        self._criteria = [(criterion, _reason(criterion)) for criterion in ranked]
        self._ends = {
            int(token) for one in ranked if isinstance(one, EosTokenCriteria) for token in one.eos_token_id.tolist()
        }

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

    # --- on the host, from the last tokens alone ---------------------------------------------------------
    @property
    def needs_only_last(self) -> bool:
        """Whether the last tokens and the history's width are all that the criteria look at."""
        return all(type(one) in _LOOK_AT_LAST for one, _ in self._criteria)

    def ends_at(self, width: int) -> bool:
        """Whether all rows are done at that width, whatever their tokens are."""
        return any(isinstance(one, MaxLengthCriteria) and width >= one.max_length for one, _ in self._criteria)

    def explain_last(self, tokens: Sequence[int], width: int) -> list[str | None]:
        """What `explain` says of a history of that width that ends in these tokens, where `needs_only_last`."""
        for_all: str | None = "length" if self.ends_at(width) else None
        if for_all is None and any(isinstance(one, MaxTimeCriteria) and one.is_over() for one, _ in self._criteria):
            for_all = "time"
        return ["eos" if token in self._ends else for_all for token in tokens]


def _reason(criterion: object) -> str:
    return next((reason for kind, reason in _REASONS if isinstance(criterion, kind)), "criteria")


def _rank(criterion: object) -> int:
    order = ("eos", "stop_string", "criteria", "length", "time")
    return order.index(_reason(criterion))
