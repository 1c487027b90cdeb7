"""What callers plug into a call with a transformers object counts as it does in transformers' own generate."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from tests.models.adapters.tiny import make, make_inputs, make_once

import unspool

IDS = make_inputs(is_left=True)["input_ids"][2:]  # the row without padding
QUIET = {"eos_token_id": None, "pad_token_id": 0}
Penalty = transformers.RepetitionPenaltyLogitsProcessor
Length = transformers.MaxLengthCriteria


@pytest.mark.parametrize(
    "call",
    [
        {"logits_processor": [Penalty(4.0)], "repetition_penalty": 1.5, "max_new_tokens": 8},
        {"logits_processor": [Penalty(4.0)], "no_repeat_ngram_size": 2, "max_new_tokens": 8},
        {"stopping_criteria": [Length(IDS.shape[1] + 25)]},
        {"stopping_criteria": [Length(IDS.shape[1] + 9)], "max_new_tokens": 4},
        {"stopping_criteria": [Length(IDS.shape[1] + 3)], "max_length": IDS.shape[1] + 8},
        {"stopping_criteria": [Length(IDS.shape[1] + 3)], "max_new_tokens": 16, "num_beams": 2},
        {"stopping_criteria": [Length(IDS.shape[1])], "max_new_tokens": 4},  # it ends the first step
        {"stopping_criteria": [transformers.MaxTimeCriteria(1e6)], "max_time": 1e-9, "max_new_tokens": 6},
    ],
)
@pytest.mark.parametrize("name", ["phi3", "bart"])
@pytest.mark.filterwarnings("ignore:Using the model-agnostic default:UserWarning")  # transformers' own
def test_one_of_a_kind_that_settings_make_takes_its_place(name: str, call: dict[str, Any]) -> None:
    model = make_once(name)
    lists = {
        "logits_processor": transformers.LogitsProcessorList,
        "stopping_criteria": transformers.StoppingCriteriaList,
    }
    call = {key: lists[key](value) if key in lists else value for key, value in call.items()}
    expected = model.generate(IDS, **call, **QUIET, do_sample=False)
    assert torch.equal(unspool.generate(model, IDS, **call, **QUIET, do_sample=False), expected)


@pytest.mark.parametrize("limit", [3, 9])
@pytest.mark.parametrize("with_ids", [True, False])
def test_a_length_of_theirs_counts_tokens_and_no_embeddings(with_ids: bool, limit: int) -> None:
    model = make_once("phi3")
    given: dict[str, Any] = {"inputs_embeds": model.get_input_embeddings()(IDS), **QUIET, "max_new_tokens": 2}
    given |= {"input_ids": IDS} if with_ids else {}
    criteria = transformers.StoppingCriteriaList([Length(limit)])
    expected = model.generate(**given, stopping_criteria=criteria, do_sample=False)
    assert torch.equal(unspool.generate(model, **given, stopping_criteria=criteria), expected)
    assert expected.shape[1] == max(limit, IDS.shape[1] + 1 if with_ids else 1)


def test_ours_replaces_a_length_that_nobody_set() -> None:
    model, limit = make_once("phi3"), IDS.shape[1] + 23
    criteria = [unspool.MaxLengthCriteria(limit)]
    assert unspool.generate(model, IDS, stopping_criteria=criteria, **QUIET).shape[1] == limit
    assert unspool.generate(model, IDS, stopping_criteria=criteria, max_new_tokens=2, **QUIET).shape[1] == limit - 21


@pytest.mark.parametrize("schedule", ["heuristic", "heuristic_transient", "constant"])
@pytest.mark.parametrize("num_new", [5, 8])
def test_the_length_of_drafts_is_kept_with_the_object(schedule: str, num_new: int) -> None:
    model, lengths = make("phi3"), []
    call = {"max_new_tokens": num_new, "do_sample": False, "assistant_model": model, **QUIET}
    for generate in (model.generate, lambda *args, **kwargs: unspool.generate(model, *args, **kwargs)):
        model.generation_config.num_assistant_tokens = 5
        model.generation_config.num_assistant_tokens_schedule = schedule
        model.generation_config.assistant_confidence_threshold = 1.0  # drafts of one token
        generate(IDS, **call)
        lengths.append(model.generation_config.num_assistant_tokens)
    assert lengths[0] == lengths[1] and (lengths[0] > 5) == (schedule == "heuristic")


def test_a_loop_gets_what_settings_make() -> None:
    model, seen = make_once("phi3"), {}

    def loop(model: Any, input_ids: Any, logits_processor: Any, stopping_criteria: Any, **kwargs: Any) -> str:
        seen.update(kwargs, processors=logits_processor, criteria=stopping_criteria, ids=input_ids)
        return "done"

    mine = transformers.LogitsProcessorList([Penalty(4.0)])
    call = {"max_new_tokens": 3, "repetition_penalty": 1.5, "min_new_tokens": 2, "eos_token_id": 2, "own": 7}
    assert unspool.generate(model, IDS, custom_generate=loop, logits_processor=mine, **call) == "done"
    assert seen["criteria"][0].max_length == IDS.shape[1] + 3 and seen["own"] == 7
    assert mine[0] in seen["processors"]
    scores = seen["processors"](seen["ids"], torch.randn(1, 97))
    assert scores[0, 2] == float("-inf")
    assert not seen["criteria"](seen["ids"], scores).any()


@pytest.mark.parametrize("kind", [TypeError, ValueError, IndexError])
def test_errors_of_a_model_keep_their_kind(kind: type[Exception]) -> None:
    model = make("phi3")

    def fail(*_args: Any, **_kwargs: Any) -> None:
        raise kind("of its own")

    model.model.forward = fail
    with pytest.raises(kind, match="of its own") as raised:
        unspool.generate(model, IDS, max_new_tokens=2)
    assert isinstance(raised.value, unspool.UnsupportedError)


@pytest.mark.parametrize(
    ("kind", "is_returned"),
    [
        *(
            (kind, is_returned)
            for kind in ("sliding_window", "hybrid", "hybrid_chunked", "offloaded_static")
            for is_returned in (False, True)
        ),
        ("offloaded_hybrid", False),  # unspool's own would be returned
        ("offloaded_hybrid_chunked", False),
    ],
)
@pytest.mark.parametrize("name", ["llama", "gemma2", "bart"])
def test_every_name_of_a_static_cache_is_taken(name: str, kind: str, is_returned: bool) -> None:
    model = make_once(name)
    settings = {**QUIET, "max_new_tokens": 8, "return_dict_in_generate": is_returned}
    expected = unspool.generate(model, IDS, **settings)
    found = unspool.generate(model, IDS, cache_implementation=kind, **settings)
    if is_returned:
        held = found.past_key_values
        assert isinstance(getattr(held, "self_attention_cache", held), transformers.StaticCache)
        assert found.sequences.tolist() == expected.sequences.tolist()
    else:
        assert found.tolist() == expected.tolist()
