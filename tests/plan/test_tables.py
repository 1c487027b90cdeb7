"""Every line of the tables of pairs says what it is about."""

from __future__ import annotations

import re
from collections import defaultdict

import pytest
from tests.fakes import FakeModel

from unspool import GenerationConfig
from unspool.config import PARAMETERS, conflicts
from unspool.config.pairs import Method, Pair, make_message
from unspool.plan import PromptShape
from unspool.plan.pairs import Facts
from unspool.plan.strategies import refuse_drafts
from unspool.plan.tables import calls, drafts, methods, models

HOMES = (conflicts, methods, models, drafts, calls)
FOUND = [value if isinstance(value, tuple) else (value,) for home in HOMES for value in vars(home).values()]
METHODS = [one for value in FOUND for one in value if isinstance(one, Method)]
LINES = [(method, pair) for method in [*METHODS, refuse_drafts()] for pair in method.pairs]
GIVEN = {
    "drafter": "`a`",
    "guide": "B",
    "assistant": FakeModel().info,
    "relation": "same",
    "wish": "c",
    "origin": "d",
    "why_even": "the model takes no positions",
}


def test_the_tables_are_found() -> None:
    assert len(METHODS) > 25 and len(LINES) > 60


@pytest.mark.parametrize(("method", "pair"), LINES, ids=lambda value: "")
def test_every_line_makes_a_message(method: Method[Facts], pair: Pair[Facts]) -> None:
    spoken = defaultdict(lambda: "in the call")
    facts = Facts(
        GenerationConfig(), FakeModel().info, PromptShape(1, 2, 2), spoken=spoken, cache_kind="static", given=GIVEN
    )
    message = make_message(method, pair, facts)
    assert len(message) > 40 and "{" not in message and "  " not in message
    for setting in re.findall(r"`(\w+)`", message):  # what it names is a setting or an argument
        assert setting in PARAMETERS or setting in ("assistant_model", "assistant_tokenizer", "tokenizer", "a", "c")
    if isinstance(pair.beside, str):
        assert pair.beside in PARAMETERS
