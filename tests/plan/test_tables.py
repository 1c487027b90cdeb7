"""Every line of the tables of pairs says what it is about."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace

import pytest
from tests.fakes import FakeModel

from unspool import GenerationConfig
from unspool.config import PARAMETERS, conflicts
from unspool.config.pairs import Method, Pair, make_message
from unspool.plan import PromptShape
from unspool.plan.pairs import Facts
from unspool.plan.strategies import refuse_drafts
from unspool.plan.tables import calls, drafts, methods, models
from unspool.protocols import FeatureShape
from unspool.wording import Setting

INFO = replace(FakeModel().info, features=FeatureShape(80, 3000, 2))
HOMES = (conflicts, methods, models, drafts, calls)
FOUND = [value if isinstance(value, tuple) else (value,) for home in HOMES for value in vars(home).values()]
METHODS = [one for value in FOUND for one in value if isinstance(one, Method)]
LINES = [(method, pair) for method in [*METHODS, refuse_drafts()] for pair in method.pairs]
GIVEN = {
    "source": Setting("assistant_model"),
    "guide": "B",
    "assistant": INFO,
    "relation": "same",
    "wish": Setting("compile"),
    "origin": "d",
    "why_even": "the model takes no positions",
}


def test_the_tables_are_found() -> None:
    assert len(METHODS) > 25 and len(LINES) > 60


@pytest.mark.parametrize(("method", "pair"), LINES, ids=lambda value: "")
def test_every_line_makes_a_message(method: Method[Facts], pair: Pair[Facts]) -> None:
    spoken = defaultdict(lambda: "in the call")
    facts = Facts(GenerationConfig(), INFO, PromptShape(1, 2, 2), spoken=spoken, cache_kind="static", given=GIVEN)
    wording = make_message(method, pair, facts)
    message, text = str(wording), " ".join(part for part in wording.parts if isinstance(part, str))
    assert len(message) > 40 and "{" not in message and "  " not in message
    assert {one.name for one in wording.settings} <= {*PARAMETERS, "assistant_model"}
    for name in re.findall(r"`(\w+)`", text):  # what is marked otherwise is an argument
        assert name in ("assistant_model", "assistant_tokenizer", "tokenizer")
    assert not [name for name in re.findall(r"\w+_\w+", text) if name in PARAMETERS]
    assert not PARAMETERS.keys() & facts.name_values().keys()
    if isinstance(pair.beside, str):
        assert pair.beside in PARAMETERS
