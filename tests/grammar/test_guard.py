"""Hostile grammars: refused or served, and nothing held up for more than two seconds and 300 MB."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from tests.grammar.tiny import make_tokenizer
from unspool.errors import SettingError
from unspool.grammar import guard
from unspool.grammar.compiling import compile_grammar
from unspool.grammar.sources import read_source
from unspool.grammar.vocabulary import find_vocabulary


def _nest(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def _any_of(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for level in range(depth):
        schema = {"anyOf": [{"type": "object", "properties": {f"k{level}": schema}}, schema]}
    return schema


ATTACKS: dict[str, tuple[str, Any]] = {
    "100,000 nested arrays": ("json_schema", '{"items":' * 100_000 + "{}" + "}" * 100_000),
    "500 nested arrays": ("json_schema", json.dumps(_nest(500))),
    "enum of 50,000": ("json_schema", {"enum": [f"m{number}" for number in range(50_000)]}),
    "5,000 properties": ("json_schema", {"properties": {f"p{number}": {} for number in range(5_000)}}),
    "26 patterns at once": ("json_schema", {"allOf": [{"pattern": f".*{chr(97 + n)}.*"} for n in range(26)]}),
    "multipleOf a prime": ("json_schema", {"type": "integer", "multipleOf": 1_000_003}),
    "states of a pattern": ("regex", "(.*a.{200})"),
    "nested alternatives": ("json_schema", _any_of(12)),
    "ambiguous": ("grammar", 'start: s\ns: s s | s s s | "a"'),
    "regex of a megabyte": ("regex", "(a|b)" * 200_000),
    "counts of counts": ("regex", "((a{1,1000}){1,1000}){1,1000}"),
    "ten megabytes of description": ("json_schema", {"description": "x" * 10_000_000}),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_no_grammar_holds_anything_up(name: str) -> None:
    setting, value = ATTACKS[name]
    vocabulary = find_vocabulary(make_tokenizer(), 160)
    simple = read_source("grammar", 'start: "x" | "yy"')
    assert simple is not None
    guard.check_guarded(vocabulary, simple.text, {})  # the process is there
    started = time.process_time()
    try:
        source = read_source(setting, value)
        assert source is not None
        made = compile_grammar(source, vocabulary)
        matcher = made.start()
        matcher.compute_bitmask()
    except SettingError as error:
        assert setting in str(error)
    assert time.process_time() - started < 2.5  # of this process


def test_a_killed_process_is_started_again() -> None:
    vocabulary = find_vocabulary(make_tokenizer(), 160)
    slow = read_source("json_schema", ATTACKS["26 patterns at once"][1])
    good = read_source("grammar", 'start: "a" | "b"')
    assert slow is not None
    assert good is not None
    assert "too complex" in guard.check_guarded(vocabulary, slow.text, {})
    assert guard.check_guarded(vocabulary, good.text, {}) == ""
    guard.close_guards()
