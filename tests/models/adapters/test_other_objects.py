"""transformers objects that keep states, read sound, keep nothing or have no head."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from tests.conformance.cases import load_adapted
from tests.models.adapters.tiny import make, make_once

import unspool
from unspool.errors import InputError, SettingError, UnsupportedError

NEW = {"max_new_tokens": 12, "eos_token_id": None}


@cache
def make_others() -> dict[str, Any]:
    sizes = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "intermediate_size": 16}
    pair = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "input_feat_per_channel": 8, "vocab_size": 40}
    pair |= dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2)
    pair |= dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 0)
    return {
        "mamba": transformers.MambaForCausalLM(transformers.MambaConfig(**sizes, state_size=4)).eval(),
        "mamba2": transformers.Mamba2ForCausalLM(
            transformers.Mamba2Config(**sizes, state_size=4, num_heads=4, head_dim=8, n_groups=1)
        ).eval(),
        "bert": transformers.BertModel(transformers.BertConfig(**sizes, **heads)).eval(),
        "speech_to_text": transformers.Speech2TextForConditionalGeneration(
            transformers.Speech2TextConfig(**pair)
        ).eval(),
    }


@pytest.mark.parametrize("name", ["mamba", "mamba2"])
def test_objects_that_keep_states(name: str) -> None:
    model, ids = make_others()[name], torch.tensor([[5, 6, 7], [9, 8, 7]])
    expected = model.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None)
    output = unspool.generate(model, ids, max_new_tokens=4, eos_token_id=None, return_dict_in_generate=True)
    assert torch.equal(output.sequences, expected)
    assert "keeps states instead of keys" in output.stats.path_reason


def test_objects_that_read_sound() -> None:
    model = make_others()["speech_to_text"]
    features = torch.randn(2, 20, 8, generator=torch.Generator().manual_seed(0))
    expected = model.generate(features, max_new_tokens=4, do_sample=False, eos_token_id=None)
    assert torch.equal(unspool.generate(model, features, max_new_tokens=4, eos_token_id=None), expected)


def test_a_model_without_a_head_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="no head that gives logits"):
        unspool.generate(make_others()["bert"], [[5, 6]], max_new_tokens=2)


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({"input_ids": torch.tensor([[5, 6]])}, "reads sound"),
        ({"input_features": torch.zeros(1, 15, 60)}, r"has the shape \(1, 15, 60\).*\(rows, 16, "),
        ({"input_features": torch.full((1, 16, 60), torch.nan)}, "NaN"),
        ({"input_features": torch.zeros(16, 60)}, "floating-point tensor"),
        ({"input_features": torch.zeros(1, 16, 60), "input_ids": torch.tensor([[5]])}, "two sources"),
    ],
)
def test_what_a_model_of_sound_cannot_read(inputs: dict[str, torch.Tensor], words: str) -> None:
    with pytest.raises(InputError, match=words):
        unspool.generate(load_adapted("whisper"), **inputs, max_new_tokens=2)


def test_features_are_not_for_readers_of_tokens() -> None:
    for name in ("bart", "llama"):
        with pytest.raises(SettingError, match="no setting 'input_features'"):
            unspool.generate(load_adapted(name), input_features=torch.zeros(1, 16, 60), max_new_tokens=2)


def test_a_model_in_training_mode_answers_as_in_evaluation_mode() -> None:
    for name in ("gpt2", "bart"):
        model = make(name).train()
        assert torch.equal(unspool.generate(model, [[5, 6]], **NEW), unspool.generate(make_once(name), [[5, 6]], **NEW))
        assert all(part.training for part in model.modules())


def test_models_that_keep_nothing() -> None:
    model = make("llama")
    model.model.forward = leave_out(model.model.forward)
    with pytest.raises(UnsupportedError, match="wrote nothing to the past_key_values"):
        unspool.generate(model, [[5, 6]], max_new_tokens=2)


def leave_out(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, past_key_values: Any = None, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    return run
