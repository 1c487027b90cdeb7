"""`stats.cached_tokens` counts what of the prompts was not read again, wherever it was held."""

from __future__ import annotations

from typing import Any

import pytest
from tests.grammar.tiny import load_tiny

import unspool


@pytest.mark.parametrize("asked", [{}, {"num_beams": 2}, {"do_sample": True, "seed": 1, "num_return_sequences": 2}])
def test_a_prefix(asked: dict[str, Any]) -> None:
    pytest.importorskip("greenlet")
    lm = load_tiny("llama")
    prefix = lm.prefix([3, 4, 5, 6, 7, 8])
    assert prefix.generate([9, 10], max_new_tokens=3, **asked).stats.cached_tokens == 6
    assert lm.generate([9, 10], prefix=prefix, max_new_tokens=3, **asked).stats.cached_tokens == 6
    assert prefix.generate([[9, 10], [11]], max_new_tokens=3, **asked).stats.cached_tokens == 12
    assert lm.generate([3, 4, 5], max_new_tokens=3, **asked).stats.cached_tokens == 0
    with unspool.Engine(lm) as engine:
        request = engine.submit([9, 10], prefix=prefix, max_new_tokens=3, **asked)
        assert request.result(30).stats.cached_tokens == 6


def test_a_callers_cache() -> None:
    model, cache = load_tiny("llama").model, unspool.DynamicCache()
    first = unspool.generate(model, [[3, 4, 5]], max_new_tokens=4, eos_token_id=None, past_key_values=cache)
    output = unspool.generate(
        model, first, max_new_tokens=2, eos_token_id=None, past_key_values=cache, return_dict_in_generate=True
    )
    assert output.stats.cached_tokens == first.shape[1] - 1
