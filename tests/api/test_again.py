"""Calls that begin as an earlier one did: the same answers and errors, and nothing of the earlier call in them."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
from tests.conformance.cases import load_model
from tests.engine.fakes import Fake, make_lm

from unspool.api import again
from unspool.api.again import describe_call
from unspool.errors import InputError, SettingError, UnspoolError

ASKED: list[dict[str, Any]] = [
    {},
    {"max_new_tokens": 4},
    {"do_sample": True, "seed": 3, "top_k": 5, "temperature": 0.7},
    {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2, "encoder_repetition_penalty": 1.2},
    {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 5},
    {"prompt_lookup_num_tokens": 3},
    {"stop_strings": "a", "max_new_tokens": 12},
    {"token_healing": True, "max_new_tokens": 5},
    {"eos_token_id": [4, 5], "min_new_tokens": 2},
    {"logprobs": 2, "max_new_tokens": 4},
    {"mirostat_tau": 3.0, "do_sample": True, "seed": 1},
    {"return_dict_in_generate": True, "max_new_tokens": 3},
]
PROMPTS: list[Any] = ["hello", "hello world", [3, 4, 5], [[3, 4], [5, 6]], [[7, 8, 9], [10, 3, 4]], [[3], [4, 5]]]


def call(lm: Any, prompt: Any, asked: dict[str, Any]) -> Any:
    try:
        result = lm.generate(prompt, **{"max_new_tokens": 7, **asked})
    except UnspoolError as error:
        return type(error), str(error)
    return result.token_ids, result.texts, result.finish_reasons, result.prompt_token_ids, result.logprobs


@pytest.mark.parametrize("asked", ASKED, ids=str)
def test_a_call_is_the_same_whether_its_like_came_before(asked: dict[str, Any]) -> None:
    lm = make_lm(Fake(vocab=160), has_tokenizer=True)
    fresh = []
    for prompt in PROMPTS:
        again._known.clear()
        fresh.append(call(lm, prompt, asked))
    again._known.clear()
    assert [call(lm, prompt, asked) for prompt in PROMPTS * 2] == fresh * 2


def test_what_a_call_follows_from_is_looked_at_each_time() -> None:
    lm = make_lm(Fake(vocab=160), has_tokenizer=True)
    assert len(lm.generate("hello", max_new_tokens=4, eos_token_id=None).token_ids[0]) == 4
    assert len(lm.generate("hello", max_new_tokens=5, eos_token_id=None).token_ids[0]) == 5
    for length in (3, 6):
        lm.generation_config.max_new_tokens = length
        assert len(lm.generate("hello", eos_token_id=None).token_ids[0]) == length
    with pytest.raises(InputError, match="160"):
        lm.generate([3, 160], eos_token_id=None)
    with pytest.raises(SettingError, match="min_new_tokens"):
        lm.generate("hello", eos_token_id=None, min_new_tokens=-1)


def test_lengths_and_seeds_may_differ() -> None:
    lm = make_lm()
    asked = [{"max_new_tokens": 3 + place % 4, "seed": place} for place in range(8)]
    again._known.clear()
    results = [lm.generate([3, 4], do_sample=True, eos_token_id=None, **one).token_ids for one in asked]
    assert len(again._known.get(lm.model)._kept) == 1
    for one, tokens in zip(asked, results, strict=True):
        again._known.clear()
        assert lm.generate([3, 4], do_sample=True, eos_token_id=None, **one).token_ids == tokens
    assert len({tuple(tokens[0][:3]) for tokens in results}) > 1
    for wrong in ({"seed": -1}, {"max_new_tokens": 0}, {"seed": 2**70}, {"max_new_tokens": True}):
        with pytest.raises(SettingError, match=next(iter(wrong))):
            lm.generate([3, 4], **{"do_sample": True, "eos_token_id": None, "max_new_tokens": 3, "seed": 3, **wrong})


def test_lengths_are_checked_each_time() -> None:
    lm = make_lm(Fake(max_context=12))
    assert len(lm.generate([3, 4], max_new_tokens=8, eos_token_id=None).token_ids[0]) == 8
    with pytest.raises(SettingError, match="at most `max_new_tokens=7` fit"):
        lm.generate([3, 4, 5, 6, 7], max_new_tokens=8, eos_token_id=None)


def test_arguments_that_are_no_settings_make_a_call_of_its_own() -> None:
    lm = make_lm()
    assert describe_call(lm.model, None, {"top_k": 3}, 1) is not None
    for settings in ({"logits_processor": []}, {"top_k": object()}, {"observer": None}):
        assert describe_call(lm.model, None, settings, 1) is None
    keys = [describe_call(lm.model, None, {"top_k": 3}, rows) for rows in (1, 2)]
    assert keys[0] != keys[1]


def test_models_are_not_kept() -> None:
    lm = make_lm()
    lm.generate([3, 4], max_new_tokens=2)
    model = weakref.ref(lm.model)
    assert len(again._known.get(lm.model)._kept) == 1
    del lm
    gc.collect()
    assert model() is None


def test_what_is_kept_follows_values_and_not_the_callers_objects() -> None:
    lm = load_model("llama")
    bias, mark = {"7": 4.0}, {"bias": 3.0, "greenlist_ratio": 0.5}
    asked = {"max_new_tokens": 5, "eos_token_id": None, "logit_bias": bias, "watermarking_config": mark}
    first = lm.generate([5, 6, 7], **asked).token_ids
    bias["7"], mark["bias"] = -4.0, 0.5  # another call
    other = lm.generate([5, 6, 7], **asked).token_ids
    bias["7"], mark["bias"] = 4.0, 3.0
    assert lm.generate([5, 6, 7], **asked).token_ids == first
    fresh = {**asked, "logit_bias": {"7": -4.0}, "watermarking_config": {"bias": 0.5, "greenlist_ratio": 0.5}}
    assert lm.generate([5, 6, 7], **fresh).token_ids == other != first
