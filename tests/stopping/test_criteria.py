from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from unspool.errors import InputError, SettingError
from unspool.stopping import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    as_criteria_list,
    as_row_flags,
    validate_stopping_criteria,
)

CPU = torch.device("cpu")


def ids(rows: int, length: int) -> torch.Tensor:
    return torch.arange(rows * length).reshape(rows, length)


def test_length() -> None:
    criterion = MaxLengthCriteria(max_length=10)
    assert criterion(ids(3, 10), None).tolist() == [True] * 3
    assert criterion(ids(3, 9), None).tolist() == [False] * 3
    assert criterion(ids(3, 11), None).dtype == torch.bool
    with pytest.raises(SettingError, match="max_length"):
        MaxLengthCriteria(max_length=-1)


def test_length_past_the_model_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    criterion = MaxLengthCriteria(max_length=10, max_position_embeddings=4)
    with caplog.at_level(logging.WARNING, "unspool.stopping"):
        criterion(ids(1, 4), None)
        assert caplog.records == []
        criterion(ids(1, 5), None)
        criterion(ids(1, 6), None)
    assert len(caplog.records) == 1


def test_time() -> None:
    assert MaxTimeCriteria(max_time=60)(ids(2, 3), None).tolist() == [False, False]
    late = MaxTimeCriteria(max_time=0.1, initial_timestamp=time.time() - 0.2)
    assert late(ids(2, 3), None).tolist() == [True, True]
    with pytest.raises(SettingError, match="max_time"):
        MaxTimeCriteria(max_time=float("nan"))


@pytest.mark.parametrize("end", [5, [5], [9, 5], torch.tensor([5, 7])])
def test_end_token(end: Any) -> None:
    tokens = torch.tensor([[1, 5], [5, 1], [0, 0]])
    assert EosTokenCriteria(end)(tokens, None).tolist() == [True, False, False]


@pytest.mark.parametrize("bad", [None, "5", [], 1.5, [True], torch.tensor([1.0])])
def test_bad_end_tokens_are_refused(bad: Any) -> None:
    with pytest.raises(SettingError, match="eos_token_id"):
        EosTokenCriteria(bad)


def test_list_joins_by_or() -> None:
    criteria = StoppingCriteriaList([MaxLengthCriteria(4), EosTokenCriteria(7)])
    assert criteria(torch.tensor([[1, 7], [7, 1]]), None).tolist() == [True, False]
    assert criteria(torch.tensor([[1, 2, 3, 4]]), None).tolist() == [True]
    assert criteria.max_length == 4
    assert StoppingCriteriaList()(ids(2, 2), None).tolist() == [False, False]
    assert StoppingCriteriaList([EosTokenCriteria(7)]).max_length is None


@pytest.mark.parametrize(
    ("answer", "flags"),
    [
        (True, [True, True]),
        (False, [False, False]),
        (torch.tensor(True), [True, True]),
        (torch.tensor([False]), [False, False]),
        (np.bool_(True), [True, True]),
        (torch.tensor([True, False]), [True, False]),
        (torch.tensor([[True], [False]]), [True, False]),
        (torch.tensor([0, 1]), [False, True]),
        ([True, False], [True, False]),
        (np.array([False, True]), [False, True]),
    ],
)
def test_answers_of_every_shape(answer: Any, flags: list[bool]) -> None:
    found = as_row_flags(answer, 2, CPU)
    assert found.tolist() == flags
    assert found.dtype == torch.bool
    assert found.shape == (2,)


@pytest.mark.parametrize("answer", [None, "yes", torch.ones(3), torch.tensor([True] * 3), torch.ones(2, 2).bool(), 2.0])
def test_other_answers_are_refused(answer: Any) -> None:
    with pytest.raises(InputError, match="stopping criterion"):
        as_row_flags(answer, 2, CPU)


class OneObject(StoppingCriteria):
    """A criterion given alone, with a length and an iterator of its own, that answers with one flag or a tensor."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
        return len(input_ids[0]) > 1 and input_ids[0][-1] == 5 and input_ids[0][-2] == 84

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[Any]:
        yield self


def test_a_criterion_may_stand_alone() -> None:
    criteria = as_criteria_list(OneObject())
    assert len(criteria) == 1
    assert criteria(torch.tensor([[1, 84, 5]]), None).tolist() == [True]
    assert criteria(torch.tensor([[1, 84, 6]]), None).tolist() == [False]
    assert criteria(torch.tensor([[5]]), None).tolist() == [False]


def test_lists_of_every_kind() -> None:
    one = MaxLengthCriteria(3)
    listed = StoppingCriteriaList([one])
    assert as_criteria_list(None) == []
    assert as_criteria_list(listed) is listed
    assert as_criteria_list([one, one]) == [one, one]
    assert as_criteria_list((one,)) == [one]
    assert as_criteria_list(lambda ids, scores: True)(ids(2, 1), None).tolist() == [True, True]
    for bad in (3, [one, 3], "ab"):
        with pytest.raises(SettingError, match="stopping_criteria"):
            as_criteria_list(bad)


def test_validate_adds_a_length_or_warns() -> None:
    given = StoppingCriteriaList()
    added = validate_stopping_criteria(given, 11)
    assert added.max_length == 11
    assert len(given) == 0
    kept = StoppingCriteriaList([MaxLengthCriteria(10)])
    assert len(validate_stopping_criteria(kept, 10)) == 1
    with pytest.warns(UserWarning, match="max_length"):
        validate_stopping_criteria(kept, 11)
