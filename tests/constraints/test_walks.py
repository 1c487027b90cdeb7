"""The reference's constraints and ours say the same after every token of a walk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.constraints.walks import draw_case, make, walk_constraint, walk_list

from unspool import constraints

CASES = json.loads((Path(__file__).parent / "walks.json").read_text())


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"seed{case['seed']}")
def test_as_the_reference(case: dict[str, Any]) -> None:
    assert walk_constraint(constraints, case["words"][0], case["tokens"]) == case["alone"]
    assert walk_list(constraints, case["words"], case["tokens"]) == case["together"]


def test_the_recording_shows_all_there_is_to_see() -> None:
    assert any(isinstance(case["words"][0][0], list) for case in CASES)
    assert any(isinstance(case["words"][0][0], int) for case in CASES)
    completed = [case["together"][-1][2] for case in CASES]
    assert 0 < sum(completed) < len(completed)
    steps = {tuple(step[1:4]) for case in CASES for step in case["alone"]}
    assert steps == {(1, 0, 0), (1, 1, 0), (0, 0, 1)}  # stepped, completed, reset


@pytest.mark.parametrize("seed", range(50))
def test_every_drawn_constraint_keeps_the_contract(seed: int) -> None:
    for word in draw_case(seed)["words"]:
        make(constraints, word).test()
