"""Structured texts in the engine: each request's is what it is alone."""

from __future__ import annotations

import time
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

import unspool
from tests.grammar.tiny import load_tiny

PROMPTS = [[5, 17, 90], [40, 41], [100, 7, 8, 9, 60], [12]]
WAYS: list[dict[str, Any]] = [
    {"regex": "(ab|no){2,6}!"},
    {"json_schema": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}, "do_sample": True, "seed": 4},
    {"choice": ["yes", "no", "nobody"], "num_beams": 2},
    {},
]


def test_requests_with_grammars_are_what_they_are_alone() -> None:
    lm = load_tiny("llama")
    common = {"max_new_tokens": 24, "eos_token_id": 2}
    alone = [lm.generate([prompt], **common, **way) for prompt, way in zip(PROMPTS, WAYS, strict=True)]
    with unspool.Engine(lm, max_rows=8) as engine:
        requests = [engine.submit(prompt, **common, **way) for prompt, way in zip(PROMPTS, WAYS, strict=True)]
        found = [request.result() for request in requests]
    assert [one.token_ids for one in found] == [one.token_ids for one in alone]
    assert found[1].parsed == alone[1].parsed


def test_grammars_of_many_requests_are_one_chain(chains: list[int]) -> None:
    lm = load_tiny("llama")
    asked: list[dict[str, Any]] = [
        {"regex": "(ab|no){2,6}!"},
        {"json_schema": {"type": "array", "items": {"type": "boolean"}, "maxItems": 9}},
        {"regex": "(ab|no){2,6}!", "max_new_tokens": 3},
        {"json_schema": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
        {"choice": ["yes", "nobody", "noon at the latest"], "forced_bos_token_id": None},
    ]
    prompts = [*PROMPTS, [9] * 30]
    common = {"eos_token_id": 2, "do_sample": True, "drafter": False}
    calls = [
        (prompt, {"max_new_tokens": 40, "seed": seed, **common, **way})
        for seed, (prompt, way) in enumerate(zip(prompts, asked, strict=True))
    ]
    alone = [lm.generate(prompt, **way).token_ids for prompt, way in calls]
    with unspool.Engine(lm, max_rows=8) as engine:
        first = [engine.submit(prompt, **way) for prompt, way in calls]
        while engine.stats.new_tokens < 8:  # others join while these write
            time.sleep(0.001)
        later = [engine.submit(prompt, **way) for prompt, way in calls]
        assert [one.result().token_ids for one in first] == alone
        assert [one.result().token_ids for one in later] == alone
    assert max(chains) == 1


@settings(max_examples=15, deadline=None)
@given(
    order=st.permutations(range(6)),
    widths=st.lists(st.integers(1, 30), min_size=6, max_size=6),
    lengths=st.lists(st.integers(1, 30), min_size=6, max_size=6),
)
def test_structured_rows_come_and_go_among_plain_ones(order: list[int], widths: list[int], lengths: list[int]) -> None:
    lm = load_tiny("llama")
    ways: list[dict[str, Any]] = [*WAYS[:2], {"choice": ["yes", "no"]}, {}, {"regex": "[a-f]{3,40}"}, WAYS[1]]
    calls = [
        ([12] * widths[place], {**ways[place], "max_new_tokens": lengths[place], "eos_token_id": 2, "drafter": False})
        for place in order
    ]
    alone = [lm.generate(prompt, **way).token_ids for prompt, way in calls]
    with unspool.Engine(lm, max_rows=4) as engine:
        requests = [engine.submit(prompt, **way) for prompt, way in calls]
        assert [one.result().token_ids for one in requests] == alone


def test_what_drafts_by_itself_alone_is_stepped_among_others(chains: list[int]) -> None:
    lm = load_tiny("llama")
    asked = {"json_schema": {"type": "array", "items": {"type": "boolean"}, "maxItems": 9}, "eos_token_id": 2}
    plain = {"max_new_tokens": 60}
    alone = [lm.generate(prompt, max_new_tokens=60, **asked) for prompt in PROMPTS]
    assert alone[0].stats.speculation
    with unspool.Engine(lm, max_rows=8) as engine:
        found = engine.submit(PROMPTS[0], max_new_tokens=60, **asked).result()
        assert found.token_ids == alone[0].token_ids and found.stats.speculation and not any(chains)
        busy = engine.submit([5, 6], **plain)
        while not engine.stats.new_tokens > found.stats.new_tokens:
            time.sleep(0.001)
        requests = [engine.submit(prompt, max_new_tokens=60, **asked) for prompt in PROMPTS]
        results = [request.result() for request in requests]
        busy.result()
    assert [one.token_ids for one in results] == [one.token_ids for one in alone]
    assert not any(one.stats.speculation for one in results)
    assert 0 < max(chains) <= 2
