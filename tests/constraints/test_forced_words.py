from __future__ import annotations

from typing import Any

import pytest
import torch

from unspool.constraints import DisjunctiveConstraint, PhrasalConstraint, make_constraints
from unspool.errors import SettingError


def test_a_word_is_a_phrase_or_alternatives() -> None:
    made = make_constraints([[130], [[101, 124], [127, 156]], [7, 8]])
    assert [type(constraint) for constraint in made] == [PhrasalConstraint, DisjunctiveConstraint, PhrasalConstraint]
    assert [constraint.token_ids for constraint in made] == [[130], [[101, 124], [127, 156]], [7, 8]]


@pytest.mark.parametrize(
    "words",
    [
        [],
        None,
        5,
        "ab",
        ((1, 2),),
        [1, 2],
        [[]],
        [[[]]],
        [[1], []],
        [[1, -1]],
        [[-1]],
        [[1.0]],
        [[1, [2]]],
        [[[1], 2]],
        [[[1, -2]]],
        [[[1], [1, 2]]],
        [(1, 2)],
        [torch.tensor([1, 2])],
        torch.tensor([[1, 2]]),
    ],
)
def test_what_cannot_be_is_refused(words: Any) -> None:
    with pytest.raises(SettingError, match="force_words_ids"):
        make_constraints(words)
