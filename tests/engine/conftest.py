"""A language model of twenty lines, and an engine over it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import unspool
from tests.engine.fakes import make_engine, make_lm


@pytest.fixture
def lm() -> unspool.LanguageModel:
    return make_lm()


@pytest.fixture
def engine(lm: unspool.LanguageModel) -> Iterator[unspool.Engine]:
    with make_engine(lm) as made:
        yield made
