"""A caller's stopping criterion among rows of different prompts: it is asked about every prompt's rows alone."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from unspool.decoding.rows import Rows
from unspool.logits.alone import Apart, share_out
from unspool.outputs import StepTensors
from unspool.stopping import (
    EosTokenCriteria,
    MaxTimeCriteria,
    StoppingCriteria,
    StopStringCriteria,
    as_row_flags,
)

_ROW_BY_ROW = (EosTokenCriteria, StopStringCriteria, MaxTimeCriteria)  # to whom padding and neighbours are nothing


@dataclass(frozen=True, slots=True)
class Shown:
    """Which rows of the call a history shows, and what of it is no token of theirs."""

    numbers: Sequence[int]  # in the call
    pads: Sequence[int]  # columns before each row's first token
    ended: Collection[int]  # places of rows that are no longer asked about

    @classmethod
    def of(
        cls,
        rows: Rows,
        places: Sequence[int] | None = None,
        *,
        width: int | None = None,
        ended: Collection[int] | None = None,
    ) -> Shown:
        """The rows at `places` (all of them without), each maybe more than once, in a history of `width` columns; those
        that have `ended` are those that the rows name, if none are given."""
        listed = range(len(rows)) if places is None else places
        padded = frozenset(rows.padded)
        if ended is None:
            ended = [at for at, place in enumerate(listed) if place in padded] if padded else ()
        columns = max(rows.ends) if width is None else width
        pads = [max(0, columns - rows.lengths[place]) for place in listed]
        return cls([rows.numbers[place] for place in listed], pads, ended)


class AloneCriterion(StoppingCriteria):
    """Asks a caller's criterion about the rows of each prompt as if there were no others."""

    def __init__(self, criterion: Any, apart: Apart) -> None:
        self.given = criterion
        self._size = apart.size
        self._made = share_out(criterion, len(apart.list_sets()))

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        """The answer for rows that are all of the call's, with nothing before them."""
        rows = list(range(len(input_ids)))
        return self.ask(input_ids, scores, Shown(rows, [0] * len(rows), ()))

    def ask(self, history: torch.Tensor, scores: StepTensors | None, shown: Shown) -> torch.Tensor:
        """Which rows of a history (rows, width) stop."""
        flags = torch.zeros(len(history), dtype=torch.bool, device=history.device)
        sets: dict[int, list[int]] = {}
        for place, number in enumerate(shown.numbers):
            if place not in shown.ended:
                sets.setdefault(number // self._size, []).append(place)
        for number, places in sets.items():
            own = history[places][:, shown.pads[places[0]] :]
            answer = self._made[number](own, self._pick(scores, number))
            flags[places] = as_row_flags(answer, len(places), history.device)
        return flags

    def _pick(self, scores: StepTensors | None, number: int) -> StepTensors | None:
        """What was kept of the scores of one prompt's rows."""
        if scores is None or len(self._made) == 1:
            return scores
        return tuple(step[number * self._size : (number + 1) * self._size] for step in scores)


def unwrap(criterion: Any) -> Any:
    """The caller's criterion, if that is what is asked."""
    return criterion.given if isinstance(criterion, AloneCriterion) else criterion


def ask_alone(criteria: Sequence[Any], apart: Apart) -> list[Any]:
    """A caller's criteria, asked about the rows of each prompt alone."""
    listed = [one for each in criteria for one in (each if isinstance(each, list) else (each,))]
    return [one if apart.is_one or type(one) in _ROW_BY_ROW else AloneCriterion(one, apart) for one in listed]
