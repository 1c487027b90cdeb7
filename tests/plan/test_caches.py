"""What a plan says about the kind of a cache."""

from __future__ import annotations

import pytest
from tests.plan.plans import plan_for

import unspool
from unspool.errors import SettingError, UnsupportedError


@pytest.mark.parametrize("kind", ["hybrid_chunked", "offloaded_hybrid_chunked"])
def test_kinds_of_cache_that_are_not_there(kind: str) -> None:
    with pytest.raises(UnsupportedError, match=f"`cache_implementation`='{kind}', set in the call, is a kind"):
        plan_for(cache_implementation=kind)


@pytest.mark.parametrize(
    ("kind", "reason"), [("sliding_window", "has no sliding window"), ("sink", "learned one by one")]
)
def test_kinds_that_a_model_has_no_use_for(kind: str, reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        plan_for(cache_implementation=kind)


def test_what_a_cache_is_told() -> None:
    static = {"cache_implementation": "static"}
    assert plan_for(**static, cache_config={"max_cache_len": 64}).cache_config == {"max_cache_len": 64}
    assert plan_for(**static, cache_config=unspool.StaticCacheConfig(2, 64)).cache_config["batch_size"] == 2
    with pytest.raises(SettingError, match=r"'max_cache_length', and a 'static' cache takes .* did you mean"):
        plan_for(**static, cache_config={"max_cache_length": 64})
    with pytest.raises(SettingError, match="is for a 'quantized' cache and `cache_implementation` is 'static'"):
        plan_for(**static, cache_config={"cache_implementation": "quantized"})
    with pytest.raises(SettingError, match="whole number above 0, not 'many'"):
        plan_for(**static, cache_config={"max_cache_len": "many"})
    with pytest.raises(SettingError, match=r"max_cache_len'\]`=11 is too little .* at least 12 are needed, 1 more"):
        plan_for(**static, cache_config={"max_cache_len": 11}, max_new_tokens=7)
    with pytest.raises(SettingError, match="is no folder"):
        plan_for(cache_implementation="offloaded", cache_config={"folder": "/no/such/place"})
    with pytest.raises(SettingError, match="lets positions go"):
        plan_for(cache_implementation="hybrid", output_attentions=True, return_dict_in_generate=True)


@pytest.mark.parametrize("kind", ["hybrid", "sliding_window"])
def test_a_models_file_may_ask_to_save_memory(kind: str) -> None:
    assert plan_for("model", cache_implementation=kind).cache_kind == "dynamic"


def test_static_caches_have_room() -> None:
    assert plan_for(cache_implementation="static", max_cache_len=12, max_new_tokens=7).cache_kind == "static"
    with pytest.raises(SettingError, match="`max_cache_len`=11 is too little for a prompt of 5 tokens and 7 new"):
        plan_for(cache_implementation="static", max_cache_len=11, max_new_tokens=7)
    with pytest.raises(SettingError, match="the cache is dynamic"):
        plan_for(max_cache_len=40)


def test_without_a_cache_its_kind_is_no_question() -> None:
    with pytest.raises(SettingError, match="`use_cache` is `False`"):
        plan_for(use_cache=False, cache_implementation="static")
    with pytest.raises(SettingError, match="which can't hold a static cache"):
        plan_for(cache_implementation="static", return_legacy_cache=True, return_dict_in_generate=True)
