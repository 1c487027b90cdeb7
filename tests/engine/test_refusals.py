"""What an engine does not take says so when it is asked for."""

from __future__ import annotations

import math
from typing import Any

import pytest

import unspool
from tests.conformance.cases import load_model
from tests.engine.fakes import ENDLESS, Slow, make_engine, make_lm


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"num_beams": 200}, "200 rows"),
        ({"max_new_tokens": 5000}, "blocks"),
        ({"priority": 1000}, "priority"),
        ({"deadline": math.nan}, "deadline"),
        ({"tenant": 7}, "tenant"),
        ({"temperature": -1.0, "do_sample": True}, "temperature"),
        ({"nonsense": 3}, "nonsense"),
    ],
)
def test_what_can_not_be_is_refused_at_submit(engine: unspool.Engine, asked: dict[str, Any], told: str) -> None:
    with pytest.raises(unspool.UnspoolError, match=told):
        engine.submit([3, 4], **asked)


def test_a_full_queue_says_so() -> None:
    with make_engine(make_lm(Slow()), max_rows=1, max_waiting=2) as engine:
        first = engine.submit([3], **ENDLESS)
        next(iter(first))
        waiting = [engine.submit([3], max_new_tokens=1) for _ in range(2)]
        with pytest.raises(unspool.ResourceError, match="max_waiting"):
            engine.submit([3])
        first.cancel()
        assert all(request.result(10).token_ids for request in waiting)


@pytest.mark.parametrize(
    "options", [{"max_rows": 0}, {"memory": 3}, {"memory": "1"}, {"tokens_per_pass": True}, {"block_size": 7}]
)
def test_engines_that_can_not_be(lm: unspool.LanguageModel, options: dict[str, Any]) -> None:
    with pytest.raises(unspool.SettingError):
        make_engine(lm, **options)


@pytest.mark.parametrize(
    ("family", "options", "told"),
    [
        ("llama", {"cache_implementation": "static"}, "one of 'paged'"),
        ("llama", {"cache_implementation": "paged_quantized", "cache_config": {"nbits": 3}}, "nbits"),
        ("llama", {"cache_implementation": "paged_quantized", "cache_config": {"num_blocks": 3}}, "`memory`"),
        ("llama", {"cache_implementation": "paged_quantized", "memory": 10_000}, "beside"),
        ("gemma2", {"cache_implementation": "paged_hybrid", "share_prefixes": True}, "share_prefixes"),
        ("mamba", {"cache_implementation": "paged_hybrid"}, "can't have"),
        ("t5", {"cache_implementation": "paged_quantized"}, "can't have"),
    ],
)
def test_kinds_of_blocks_that_can_not_be(family: str, options: dict[str, Any], told: str) -> None:
    with pytest.raises(unspool.UnspoolError, match=told):
        unspool.Engine(load_model(family), **options)


def test_requests_may_choose_another_kind_than_the_engine() -> None:
    lm = load_model("gemma2")
    asked: list[dict[str, Any]] = [
        {"cache_implementation": "dynamic"},
        {"use_cache": False},
        {"generation_config": unspool.GenerationConfig(cache_implementation="static", max_new_tokens=12)},
        {"return_dict_in_generate": True},
        {"cache_implementation": "paged_hybrid"},
        {},
    ]
    with unspool.Engine(lm, cache_implementation="paged_hybrid", max_rows=8) as engine:
        requests = [engine.submit([5, 6, 7], max_new_tokens=12, **one) for one in asked]
        found = [request.result(30).token_ids for request in requests]
        assert not engine.stats.blocks_used
    assert found == [lm.generate([5, 6, 7], max_new_tokens=12, **one).token_ids for one in asked]


def test_batch_invariance_is_given_or_refused(lm: unspool.LanguageModel) -> None:
    with pytest.raises(unspool.UnsupportedError, match="batch_invariant"):
        make_engine(lm, batch_invariant=True)
