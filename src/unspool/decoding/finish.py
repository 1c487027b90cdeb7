"""Which rows are done, and why."""

from __future__ import annotations

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


class Finish:
    """Asks every stopping criterion about every row, and remembers the first reason."""

    def __init__(self, criteria: StoppingCriteriaList) -> None:
        # What the text says comes before what a limit says, whatever order they were given in.
        ranked = sorted(criteria, key=_rank)
        self._criteria = [(criterion, _reason(criterion)) for criterion in ranked]

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


def _reason(criterion: object) -> str:
    return next((reason for kind, reason in _REASONS if isinstance(criterion, kind)), "criteria")


def _rank(criterion: object) -> int:
    order = ("eos", "stop_string", "criteria", "length", "time")
    return order.index(_reason(criterion))
