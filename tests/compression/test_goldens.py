"""Every recorded answer that is here comes out equal, or stands in differences.md."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

from tests.compression.cases import ANSWERED, CHANGED, REFUSED, Case, read_cases, run_case
from unspool import UnspoolError

CASES = read_cases()
TOLD = (Path(__file__).parent / "differences.md").read_text(encoding="utf-8")
EQUAL = [case for case in CASES if case.error is None and case.name not in (*REFUSED, *CHANGED)]
FAILED = [case for case in CASES if case.error is not None and case.name not in ANSWERED]


@pytest.mark.parametrize("case", EQUAL, ids=str)
def test_the_answer_is_the_recorded_one(case: Case) -> None:
    given = copy.deepcopy(case.args)
    assert run_case(case) == case.result
    assert case.args == given  # the caller's lists are left alone


@pytest.mark.parametrize("case", FAILED, ids=str)
def test_what_failed_is_refused_with_a_reason(case: Case) -> None:
    with pytest.raises(UnspoolError) as refusal:
        run_case(case)
    assert len(str(refusal.value)) > 20


@pytest.mark.parametrize("case", [case for case in CASES if case.name in REFUSED], ids=str)
def test_odd_input_is_refused_by_name(case: Case) -> None:
    assert f"`{case.name}`" in TOLD
    with pytest.raises(UnspoolError, match=REFUSED[case.name]):
        run_case(case)


@pytest.mark.parametrize("case", [case for case in CASES if case.name in ANSWERED], ids=str)
def test_what_need_not_fail_is_answered(case: Case) -> None:
    assert f"`{case.name}`" in TOLD
    assert run_case(case)["compressed_prompt"]


def test_many_are_equal() -> None:
    assert len(EQUAL) > 40
    assert len(FAILED) > 25
