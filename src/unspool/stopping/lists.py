"""The list that asks several criteria, and what may be given in its place."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable
from typing import Any

import torch

from unspool.errors import InputError, SettingError
from unspool.stopping.length import MaxLengthCriteria


class StoppingCriteriaList(list[Any]):
    """Criteria asked together: a row stops when any of them says so."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """The rows that stop, as a bool tensor (rows,)."""
        rows, device = input_ids.shape[0], input_ids.device
        stopped: torch.Tensor | None = None
        for criterion in self:
            flags = as_row_flags(criterion(input_ids, scores, **kwargs), rows, device)
            stopped = flags if stopped is None else stopped | flags
        return torch.zeros(rows, dtype=torch.bool, device=device) if stopped is None else stopped

    @property
    def max_length(self) -> int | None:
        """The length of the first length criterion, if there is one."""
        return next((one.max_length for one in self if isinstance(one, MaxLengthCriteria)), None)


def as_row_flags(answer: Any, rows: int, device: torch.device) -> torch.Tensor:
    """A criterion's answer, one bool or one per row, as a bool tensor (rows,)."""
    if isinstance(answer, (bool, int)) and answer in (0, 1):
        return torch.full((rows,), bool(answer), dtype=torch.bool, device=device)
    try:
        flags = answer if isinstance(answer, torch.Tensor) else torch.as_tensor(answer)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(
            f"A stopping criterion answered with a {type(answer).__name__}; it must answer with one bool, "
            f"or with one for each of the {rows} rows."
        ) from error
    if flags.is_floating_point() or flags.is_complex():
        raise InputError(f"A stopping criterion answered with numbers ({flags.dtype}); it must answer with bools.")
    flags = flags.to(device=device, dtype=torch.bool)
    if flags.numel() == 1:
        return flags.reshape(1).repeat(rows)
    if flags.shape in ((rows,), (rows, 1)):
        return flags.reshape(rows)
    raise InputError(
        f"A stopping criterion answered with the shape {tuple(flags.shape)}; it must answer with one bool, "
        f"or with one for each of the {rows} rows."
    )


def as_criteria_list(criteria: Any) -> StoppingCriteriaList:
    """One criterion, several, or None, as a list; a callable that also iterates is one criterion."""
    if criteria is None:
        return StoppingCriteriaList()
    if isinstance(criteria, StoppingCriteriaList):
        return criteria
    if callable(criteria) and not isinstance(criteria, type):
        return StoppingCriteriaList([criteria])
    criteria = [criteria] if isinstance(criteria, type) else criteria
    if not isinstance(criteria, Iterable):
        raise SettingError(
            f"`stopping_criteria` must be a criterion or a list of them, but is a {type(criteria).__name__}."
        )
    listed = StoppingCriteriaList(criteria)
    for criterion in listed:
        if isinstance(criterion, type):
            name = criterion.__name__
            raise SettingError(f"`stopping_criteria` holds the class {name}; give an object of it: {name}(…)")
        if not callable(criterion):
            raise SettingError(
                f"`stopping_criteria` holds a {type(criterion).__name__}, which can't be called. A criterion is "
                "called with (input_ids, scores) and answers which rows stop."
            )
    return listed


def validate_stopping_criteria(stopping_criteria: StoppingCriteriaList, max_length: int) -> StoppingCriteriaList:
    """A copy of the list that has a length criterion; one of another length than `max_length` is warned of."""
    listed = copy.deepcopy(stopping_criteria)
    if listed.max_length is None:
        listed.append(MaxLengthCriteria(max_length=max_length))
    elif listed.max_length != max_length:
        warnings.warn(
            f"The stopping criteria end at {listed.max_length} tokens, `max_length` at {max_length}.",
            UserWarning,
            stacklevel=2,
        )
    return listed
