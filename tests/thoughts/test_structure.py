"""Structures hold for answers, whatever was thought before: in every strategy, streamed, in the engine."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import pytest

from tests.engine.fakes import BLOCK_BYTES
from tests.thoughts.test_budget import STRATEGIES
from tests.thoughts.thinking import KINDS, QUESTION, load_thinking
from unspool.engine import Engine

SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
STRUCTURES: dict[str, Any] = {
    "json_schema": SCHEMA,
    "regex": "[ab]{3}c",
    "choice": ["hello world", "the cat"],
    "grammar": 'start: "x" ("y" | "z") "!"',
}


def is_valid(name: str, text: str) -> bool:
    if name == "json_schema":
        value = json.loads(text)
        return set(value) == {"a", "b"} and value["a"] in (1, 2) and isinstance(value["b"], bool)
    if name == "choice":
        return text in STRUCTURES["choice"]
    return re.fullmatch({"regex": "[ab]{3}c", "grammar": "x[yz]!"}[name], text) is not None


PAIRS = list(zip([one for one in STRATEGIES if one != "contrastive"], itertools.cycle(STRUCTURES)))


@pytest.mark.parametrize(("strategy", "structure"), PAIRS)
def test_answers_are_valid_and_thoughts_free(strategy: str, structure: str) -> None:
    for opens in (True, False):
        lm = load_thinking(opens=opens)
        settings = {
            "max_new_tokens": 90,
            "max_thinking_tokens": 6,
            "eos_token_id": 2,
            structure: STRUCTURES[structure],
            **STRATEGIES[strategy],
        }
        answer = lm.generate(QUESTION, **settings)
        assert answer.thoughts is not None and set(answer.finish_reasons) == {"eos"}
        assert all(is_valid(structure, text) for text in answer.texts), answer.texts
        if opens and "num_beams" not in settings:
            free = lm.generate(QUESTION, **{**settings, structure: None, "suppress_tokens": [2]})
            assert free.thoughts == answer.thoughts
        parts: list[dict[str, str]] = [{"text": "", "thought": ""} for _ in answer.texts]
        for piece in lm.stream(QUESTION, **settings):
            parts[piece.row][piece.kind] += piece
        assert [one["text"] for one in parts] == answer.texts
        assert [one["thought"] for one in parts] == answer.thoughts


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_leaves_thoughts_free(name: str) -> None:
    for opens in (True, False):
        lm = load_thinking(name, opens=opens)
        for seed in range(2):
            asked: dict[str, Any] = {"max_new_tokens": 200, "max_thinking_tokens": 5, "eos_token_id": 2}
            answer = lm.generate(QUESTION, json_schema=SCHEMA, do_sample=True, seed=seed, **asked)
            assert is_valid("json_schema", answer.text) and answer.parsed["a"] in (1, 2)
            assert answer.thought or not opens


def test_rows_of_an_engine_think_beside_rows_that_do_not() -> None:
    lm = load_thinking(opens=True)
    shared: dict[str, Any] = {"max_new_tokens": 60, "eos_token_id": 2}
    asked: list[dict[str, Any]] = [
        {"json_schema": SCHEMA, "max_thinking_tokens": 5},
        {"regex": "[ab]{3}c", "max_thinking_tokens": 9, "do_sample": True, "seed": 1},
        {"choice": ["the cat"], "thoughts": False},
        {"json_schema": SCHEMA, "max_thinking_tokens": 3, "do_sample": True, "seed": 5},
        {"max_thinking_tokens": 7},
        {"json_schema": SCHEMA, "max_thinking_tokens": 4, "num_beams": 2},
    ]
    alone = [lm.generate(QUESTION, **shared, **one) for one in asked]
    with Engine(lm, max_rows=8, memory=BLOCK_BYTES * 4000, block_size=16) as engine:
        together = [request.result() for request in [engine.submit(QUESTION, **shared, **one) for one in asked]]
    for one, other in zip(alone, together, strict=True):
        assert (one.token_ids, one.texts, one.thoughts) == (other.token_ids, other.texts, other.thoughts)


def test_a_structure_can_be_the_whole_text() -> None:
    lm = load_thinking()
    answer = lm.generate(QUESTION, thoughts=False, choice=["the cat"], eos_token_id=2, max_new_tokens=9)
    assert answer.text == "the cat" and answer.thoughts is None
    raw = lm.generate("hello", choice=["the cat"], eos_token_id=2, max_new_tokens=9)
    assert raw.text == "the cat" and raw.thoughts is None
