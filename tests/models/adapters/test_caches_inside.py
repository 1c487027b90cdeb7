"""unspool's caches, settings, processors, criteria and streamers inside transformers' own forward and generate."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from tests.models.adapters.tiny import make_inputs, make_once

import unspool

NEW = {"max_new_tokens": 12, "eos_token_id": None, "do_sample": False}
KINDS = [
    ("llama", "dynamic"),
    ("llama", "static"),
    ("gemma2", "dynamic"),
    ("gemma2", "hybrid"),
    ("gemma2", "static"),
    ("starcoder2", "sliding"),
]


def make_cache(kind: str, config: Any) -> Any:
    if kind == "dynamic":
        return unspool.DynamicCache()
    made = {"static": unspool.StaticCache, "hybrid": unspool.HybridCache, "sliding": unspool.SlidingWindowCache}[kind]
    return made(config, max_batch_size=3, max_cache_len=24)


@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_a_transformers_model_generates_over_our_cache(name: str, kind: str) -> None:
    model, inputs = make_once(name), make_inputs()
    expected = model.generate(**inputs, **NEW)
    assert torch.equal(model.generate(**inputs, **NEW, past_key_values=make_cache(kind, model.config)), expected)


@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_a_forward_goes_on_from_our_cache(name: str, kind: str) -> None:
    model, ids = make_once(name), make_inputs()["input_ids"]
    whole = model(ids, use_cache=False).logits
    cache, parts = make_cache(kind, model.config), (ids[:, :7], ids[:, 7:11], ids[:, 11:])
    with torch.no_grad():
        made = [model(part, past_key_values=cache, use_cache=True).logits for part in parts]
    torch.testing.assert_close(torch.cat(made, dim=1), whole, atol=1e-4, rtol=1e-4)


def test_processors_criteria_and_streamers() -> None:
    model, inputs = make_once("llama"), make_inputs()
    ours = [unspool.RepetitionPenaltyLogitsProcessor(1.5), unspool.MinLengthLogitsProcessor(15, 2)]
    expected = unspool.generate(model, **inputs, **NEW, logits_processor=ours)
    assert torch.equal(model.generate(**inputs, **NEW, logits_processor=unspool.LogitsProcessorList(ours)), expected)
    stops = unspool.StoppingCriteriaList([unspool.MaxLengthCriteria(15)])
    assert model.generate(**inputs, **NEW, stopping_criteria=stops).shape[1] == 15


def test_a_signature_shows_what_a_processor_requires() -> None:
    """And decoding still gives it what it takes besides: rows of different lengths answer as they do alone."""
    penalty = unspool.RepetitionPenaltyLogitsProcessor(1.5)
    assert list(inspect.signature(penalty.__call__).parameters) == ["input_ids", "scores"]
    pads = torch.tensor([2, 0])
    ids, scores = torch.tensor([[0, 0, 3], [1, 2, 3]]), torch.ones(2, 5)
    made = unspool.LogitsProcessorList([penalty])(ids, scores, pads=pads)
    assert made[0, 0] == 1 and made[0, 3] < 1
