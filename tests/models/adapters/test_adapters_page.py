"""The session that docs/adapters.md shows."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest
import torch
import transformers

import unspool

PAGE = Path(__file__).parents[3] / "docs" / "adapters.md"


@pytest.mark.filterwarnings("ignore")  # of transformers
def test_the_session_goes_as_the_page_shows() -> None:
    given = {"torch": torch, "transformers": transformers, "unspool": unspool}
    text = PAGE.read_text(encoding="utf-8").replace("```", "\n")  # a fence is no output
    session = doctest.DocTestParser().get_doctest(text, given, PAGE.name, str(PAGE), 0)
    told: list[str] = []
    failed, tried = doctest.DocTestRunner(verbose=False).run(session, out=told.append)
    assert tried > 8 and not failed, "".join(told)
