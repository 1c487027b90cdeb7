"""Models of transformers through the adapter, against transformers' own generate: token for token, row by row."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import transformers
from tests.models.adapters.tiny import DECODERS, PAIRS, make_inputs, make_once

import unspool
from unspool.api.core import as_model
from unspool.errors import SettingError
from unspool.models.adapters.description import describe

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # GPTBigCode's own

NEW = {"max_new_tokens": 8, "eos_token_id": None}
ALIGNED = {"bloom", "mpt", "gpt_neo", "imagegpt"}  # no 4-D masks, or no positions a row


def inputs_of(name: str) -> dict[str, torch.Tensor]:
    # Encoders count positions from the first column, padding or not: only on the right does padding mean nothing there.
    return make_inputs(is_left=name in DECODERS)


@cache
def answer(name: str) -> torch.Tensor:
    """The greedy answer to the common inputs."""
    found = unspool.generate(make_once(name), **inputs_of(name), **NEW)
    assert isinstance(found, torch.Tensor)
    assert len(set(found[:, -8:].flatten().tolist())) > 1  # an answer that is no answer would prove nothing
    return found


@pytest.mark.parametrize("name", [*DECODERS, *PAIRS])
def test_greedy_tokens_are_the_references(name: str) -> None:
    assert torch.equal(make_once(name).generate(**inputs_of(name), **NEW, do_sample=False), answer(name))


@pytest.mark.parametrize(
    "name", ["gemma2", "cohere2", "phi3", "mixtral", "gpt_neo", "mpt", "deepseek_v3", "bart", "t5"]
)
def test_beams_are_the_references(name: str) -> None:
    model, inputs = make_once(name), inputs_of(name)
    settings = {**NEW, "num_beams": 3, "return_dict_in_generate": True, "output_scores": True}
    expected = model.generate(**inputs, **settings, do_sample=False)
    found = unspool.generate(model, **inputs, **settings)
    assert torch.equal(found.sequences, expected.sequences)
    torch.testing.assert_close(found.sequences_scores, expected.sequences_scores, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", [*DECODERS, *PAIRS])
def test_a_row_alone_is_the_row_in_the_batch(name: str) -> None:
    inputs = inputs_of(name)
    for row in (0, 1):
        real = inputs["input_ids"][row][inputs["attention_mask"][row].bool()][None]
        assert torch.equal(unspool.generate(make_once(name), real, **NEW)[0, -8:], answer(name)[row, -8:])


WITHOUT_POSITIONS = ("mpt",)  # these number columns, so a refused draft in one row would count in its distances


@pytest.mark.parametrize("name", [*DECODERS, *PAIRS])
def test_drafts_change_nothing(name: str) -> None:
    """Rows accept different numbers of drafts, so every later pass is ragged."""
    model, inputs = make_once(name), inputs_of(name)
    prompts = {**inputs, "input_ids": (inputs["input_ids"] % 4 + 3) * inputs["attention_mask"]}  # full of repetitions
    told = {"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 1, "return_dict_in_generate": True}
    if name in WITHOUT_POSITIONS:
        with pytest.raises(SettingError, match="takes no positions"):
            unspool.generate(model, **prompts, **NEW, **told)
        prompts = {name: value[-1:] for name, value in prompts.items()}
    expected = unspool.generate(model, **prompts, **NEW)
    output = unspool.generate(model, **prompts, **NEW, **told)
    assert torch.equal(output.sequences, expected)
    assert name in PAIRS or sum(output.stats.speculation.drafted) > 0


@pytest.mark.parametrize("name", ["stablelm", "cohere2", "mpt", "bart"])
def test_processed_scores_are_the_references(name: str) -> None:
    model, inputs = make_once(name), inputs_of(name)
    settings: dict[str, Any] = {
        "do_sample": True,
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.9,
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 2,
        "max_new_tokens": 1,
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
    }
    [expected] = model.generate(**inputs, **settings).scores
    output = unspool.generate(model, **inputs, **settings)
    torch.testing.assert_close(output.scores[0], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", DECODERS)
def test_how_ragged_rows_are_read(name: str) -> None:
    model, inputs = make_once(name), make_inputs()
    adapter: Any = as_model(model)
    cache = adapter.new_cache(rows=3)
    ids = inputs["input_ids"].flip(1)
    adapter.forward(ids, cache, counts=[7, 3, 12])
    forward = adapter.forward(ids[:, :1], cache)
    assert forward.path == "eager"
    assert forward.path_reason.startswith("a transformers model runs its own forward")
    assert ("shifted to end together" in forward.path_reason) == (name in ALIGNED)
    assert cache.lengths == [8, 4, 13]


def test_a_model_that_sees_every_key_without_a_mask_is_given_one() -> None:
    """Doge's attention with torch's operator: no mask, which transformers leaves out without padding, hides nothing."""
    config = transformers.DogeConfig(
        vocab_size=99,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        pad_token_id=0,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    model = transformers.DogeForCausalLM(config).eval()
    for part in model.parameters():
        torch.nn.init.normal_(part, std=0.3)
    reason = describe(model).why_aligned
    assert reason is not None and "sees every key" in reason  # in transformers below 5.22 the tokens show it too
    inputs = make_inputs(is_left=True)
    whole = {**inputs, "attention_mask": torch.ones_like(inputs["attention_mask"])}
    for given in (inputs, whole):
        expected = model.generate(**given, **NEW, do_sample=False)
        assert torch.equal(unspool.generate(model, **given, **NEW), expected)
