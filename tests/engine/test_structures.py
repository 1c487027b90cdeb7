"""Structured texts in the engine: each request's is what it is alone."""

from __future__ import annotations

from typing import Any

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
