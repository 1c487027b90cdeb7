"""A language model of twenty lines, and an engine over it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import unspool
from tests.engine.fakes import make_engine, make_lm
from unspool.engine.plain import PlainRows


@pytest.fixture
def lm() -> unspool.LanguageModel:
    return make_lm()


@pytest.fixture
def engine(lm: unspool.LanguageModel) -> Iterator[unspool.Engine]:
    with make_engine(lm) as made:
        yield made


@pytest.fixture
def chains(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many groups of rows had processors of their own, in every step."""
    counts: list[int] = []
    launch = PlainRows.launch

    def counted(self: PlainRows, *given: Any) -> None:
        launch(self, *given)
        counts.append(self.num_chains)

    monkeypatch.setattr(PlainRows, "launch", counted)
    return counts
