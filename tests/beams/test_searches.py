"""Whole searches with the scorers decide what they decide with the reference's."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.beams.toy_search import as_ids, run_search

import unspool

CASES = json.loads((Path(__file__).parent / "searches.json").read_text())


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"seed{case['seed']}")
def test_as_the_reference(case: dict[str, Any]) -> None:
    trace: list[Any] = []
    result = run_search(case, unspool, trace)
    assert trace == case["trace"]
    if not case["displaces"]:
        # The reference closes every sequence with the first end token, whichever the search chose and scored.
        ends = as_ids(case["eos_token_id"])
        first = [[ends[0] if token in ends else token for token in one] for one in result["sequences"]]
        recorded = [[ends[0] if token in ends else token for token in one] for one in case["result"]["sequences"]]
        assert first == recorded
        assert result["sequence_scores"] == case["result"]["sequence_scores"]
        if case["result"]["beam_indices"] is not None:  # the reference forgets some
            assert result["beam_indices"] == case["result"]["beam_indices"]


@pytest.mark.parametrize("case", [case for case in CASES if case["displaces"]], ids=lambda case: f"seed{case['seed']}")
def test_finished_ones_are_not_displaced_by_what_breaks_the_constraints(case: dict[str, Any]) -> None:
    scorers = []

    class Scorer(unspool.ConstrainedBeamSearchScorer):
        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            scorers.append(self)

    names = {name: getattr(unspool, name) for name in ("PhrasalConstraint", "DisjunctiveConstraint")}
    result = run_search(case, SimpleNamespace(ConstrainedBeamSearchScorer=Scorer, **names))
    (scorer,) = scorers
    assert all(map(scorer.check_completes_constraints, result["sequences"]))


def test_the_recording_shows_all_there_is_to_see() -> None:
    for early_stopping in (True, False, "never"):
        assert any(case["early_stopping"] == early_stopping for case in CASES)
    assert any(case["length_penalty"] < 0 for case in CASES)
    assert {type(case["eos_token_id"]) for case in CASES} == {int, list, type(None)}
    assert any(case["num_beam_groups"] > 1 for case in CASES) and any(case["words"] for case in CASES)
    assert any(case["displaces"] for case in CASES)
    was_padded = [any(any(step[-1]) and not all(step[-1]) for step in case["trace"][:-1]) for case in CASES]
    assert sum(was_padded) > 3
