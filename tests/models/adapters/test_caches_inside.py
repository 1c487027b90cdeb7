"""unspool's caches, settings, processors, criteria and streamers inside transformers' own forward and generate."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
import transformers
from tests.models.adapters.tiny import make_inputs, make_once

import unspool
from unspool.errors import SettingError, UnsupportedError

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


@pytest.mark.parametrize("name", ["t5", "bart"])
@pytest.mark.parametrize("settings", [{}, {"num_beams": 3}, {"num_assistant_tokens": 3}], ids=str)
def test_a_pair_of_caches_of_an_encoder_decoder(name: str, settings: dict[str, Any]) -> None:
    model, inputs = make_once(name), make_inputs(is_left=False)
    if "num_assistant_tokens" in settings:
        inputs, settings = {key: value[-1:] for key, value in inputs.items()}, {**settings, "assistant_model": model}
    expected = model.generate(**inputs, **NEW, **settings)
    pair = unspool.EncoderDecoderCache(unspool.DynamicCache(), unspool.DynamicCache())
    assert torch.equal(model.generate(**inputs, **NEW, **settings, past_key_values=pair), expected)
    assert pair.get_seq_length() == expected.shape[1] - 1
    assert type(pair) is unspool.EncoderDecoderCache and type(copy.copy(pair)) is unspool.EncoderDecoderCache


def test_a_decoder_goes_on_over_our_pair() -> None:
    model, inputs = make_once("t5"), make_inputs(is_left=False)
    ids = torch.tensor([[1, 5, 6, 7, 8]] * 3)
    whole = model(**inputs, decoder_input_ids=ids, use_cache=False).logits
    pair = unspool.EncoderDecoderCache(unspool.DynamicCache(), unspool.DynamicCache())
    with torch.no_grad():
        made = [
            model(**inputs, decoder_input_ids=part, past_key_values=pair, use_cache=True).logits
            for part in (ids[:, :3], ids[:, 3:])
        ]
    torch.testing.assert_close(torch.cat(made, dim=1), whole, atol=1e-4, rtol=1e-4)


def test_states_of_a_mamba() -> None:
    model, ids = make_mamba("mamba"), torch.randint(3, 97, (2, 9), generator=torch.Generator().manual_seed(4))
    expected = model.generate(ids, **NEW)
    cache = unspool.MambaCache(model.config, max_batch_size=2, dtype=torch.float32)
    assert torch.equal(model.generate(ids, **NEW, cache_params=cache), expected)
    assert cache.lengths == [expected.shape[1] - 1] * 2
    whole = model(ids, use_cache=False).logits
    cache.reset()
    with torch.no_grad():
        parts = [
            model(part, cache_params=cache, use_cache=True).logits for part in (ids[:, :7], ids[:, 7:8], ids[:, 8:])
        ]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=1e-4, rtol=1e-4)
    assert cache.lengths == [9, 9]


def test_states_of_a_second_mamba_are_refused() -> None:
    model = make_mamba("mamba2")
    with pytest.raises(UnsupportedError, match="leave `cache_params` out"):
        model.generate(torch.tensor([[5, 6, 7]]), **NEW, cache_params=unspool.MambaCache(model.config, 1))


def make_mamba(name: str) -> Any:
    sizes: dict[str, Any] = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}
    torch.manual_seed(3)
    if name == "mamba":
        return transformers.MambaForCausalLM(transformers.MambaConfig(**sizes)).eval()
    config = transformers.Mamba2Config(**sizes, num_heads=8, head_dim=8, n_groups=2, chunk_size=4)
    return transformers.Mamba2ForCausalLM(config).eval()


def test_sinks_serve_until_their_window_is_full() -> None:
    """transformers' models show caches no angles any more, so nothing can be moved."""
    model, ids = make_once("llama"), make_inputs()["input_ids"][-1:]
    expected = model.generate(ids, **NEW)
    assert torch.equal(model.generate(ids, **NEW, past_key_values=unspool.SinkCache(32, 4)), expected)
    with pytest.raises(UnsupportedError, match=r"unspool\.generate"):
        model.generate(ids, **NEW, past_key_values=unspool.SinkCache(14, 2))


CONFIGS: list[dict[str, Any]] = [
    {"max_new_tokens": 6},
    {"max_length": 16},
    {},
    {"max_new_tokens": 5, "num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.5},
    {"max_new_tokens": 6, "repetition_penalty": 1.5, "no_repeat_ngram_size": 2, "min_new_tokens": 4},
    {"max_new_tokens": 6, "prompt_lookup_num_tokens": 2},
    {"max_new_tokens": 6, "return_dict_in_generate": True, "output_scores": True},
    {"max_new_tokens": 6, "cache_implementation": "static"},
]


AGNOSTIC = "ignore:Using the model-agnostic default:UserWarning"


@pytest.mark.filterwarnings(AGNOSTIC)
@pytest.mark.parametrize("settings", CONFIGS, ids=str)
def test_our_settings_inside_generate(settings: dict[str, Any]) -> None:
    model, inputs = make_once("llama"), make_inputs()
    if "prompt_lookup_num_tokens" in settings:
        inputs = {key: value[-1:] for key, value in inputs.items()}
    ours = unspool.GenerationConfig(**settings)
    theirs = transformers.GenerationConfig(**settings)
    expected = model.generate(**inputs, generation_config=theirs)
    found = model.generate(**inputs, generation_config=ours)
    if settings.get("return_dict_in_generate"):
        expected, found = expected.sequences, found.sequences
    assert torch.equal(found, expected)
    assert ours == unspool.GenerationConfig(**settings)  # a call changes nothing in it


@pytest.mark.filterwarnings(AGNOSTIC)
def test_our_settings_beside_others() -> None:
    """The model's own fill in what nobody set, and the call's win."""
    model, inputs = make_once("llama"), make_inputs()
    ours = unspool.GenerationConfig(repetition_penalty=1.5)
    theirs = transformers.GenerationConfig(repetition_penalty=1.5)
    for told in ({"max_length": 15}, {"max_new_tokens": 3}, {"num_beams": 2}):
        expected = model.generate(**inputs, generation_config=theirs, **told)
        assert torch.equal(model.generate(**inputs, generation_config=ours, **told), expected)
    before = model.generation_config
    try:
        model.generation_config = transformers.GenerationConfig(eos_token_id=5, pad_token_id=0, max_length=20)
        expected = model.generate(**inputs, generation_config=theirs)
        assert torch.equal(model.generate(**inputs, generation_config=ours), expected)
        model.generation_config = unspool.GenerationConfig(eos_token_id=5, pad_token_id=0, max_length=20)
        assert torch.equal(model.generate(**inputs, generation_config=ours), expected)
    finally:
        model.generation_config = before


def test_our_settings_with_an_assistant() -> None:
    model, inputs = make_once("llama"), {key: value[-1:] for key, value in make_inputs().items()}
    settings = {"max_new_tokens": 8, "num_assistant_tokens": 3}
    expected = model.generate(**inputs, generation_config=transformers.GenerationConfig(**settings))
    found = model.generate(**inputs, generation_config=unspool.GenerationConfig(**settings), assistant_model=model)
    assert torch.equal(found, expected)


def test_settings_that_transformers_would_pass_over_are_refused() -> None:
    model, inputs = make_once("llama"), make_inputs()
    with pytest.raises(SettingError, match="`seed` is a setting of unspool's"):
        model.generate(**inputs, generation_config=unspool.GenerationConfig(seed=3, do_sample=True))


def test_streamers_inside_generate() -> None:
    model, inputs = make_once("llama"), {key: value[-1:] for key, value in make_inputs().items()}
    expected = model.generate(**inputs, **NEW)[0, inputs["input_ids"].shape[1] :].tolist()
    streamer = unspool.TextIteratorStreamer(Words(), skip_prompt=True)
    model.generate(**inputs, **NEW, streamer=streamer)
    assert "".join(streamer).split() == [str(token) for token in expected]


class Words:
    """A tokenizer whose words are numbers."""

    def decode(self, ids: Any, **_: Any) -> str:
        return "".join(f"{int(token)} " for token in ids)


def test_processors_and_criteria() -> None:
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
