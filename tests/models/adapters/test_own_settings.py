"""Models whose class has rules of its own for a call's settings: where it ends, and what else is read."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import transformers

import unspool
from unspool.errors import SettingError, UnsupportedError
from unspool.models.adapters.columns.own_settings import find_end, follow_settings

pytestmark = pytest.mark.filterwarnings("ignore:Using the model-agnostic default:UserWarning")

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 64,
}
CODEC = {
    "model_type": "mimi",
    "num_quantizers": 4,
    "hidden_size": 16,
    "num_filters": 8,
    "upsampling_ratios": [8, 4],
    "codebook_size": 16,
    "codebook_dim": 16,
    "vector_quantization_hidden_dimension": 16,
    "upsample_groups": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "sliding_window": 4,
    "use_cache": False,
}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "without a cache": {"use_cache": False},
    "static": {"cache_implementation": "static"},
}


def shake(model: Any, scale: float = 0.3) -> Any:
    """The model with weights that let its answers depend on what it reads."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=scale)
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    return model.eval()


@cache
def make_voxtral() -> Any:
    torch.manual_seed(3)
    config = transformers.VoxtralRealtimeConfig(
        text_config={**SIZES, "vocab_size": 60, "max_position_embeddings": 64},
        audio_config={**SIZES, "num_mel_bins": 8, "max_position_embeddings": 256},
    )
    return shake(transformers.VoxtralRealtimeForConditionalGeneration(config))


@cache
def make_kyutai() -> Any:
    torch.manual_seed(3)
    config = transformers.KyutaiSpeechToTextConfig(
        **SIZES | {"ffn_dim": 38},
        vocab_size=60,
        codebook_vocab_size=17,
        num_codebooks=4,
        frame_size=64,
        max_position_embeddings=64,
        audio_bos_token_id=16,
        audio_pad_token_id=16,
        bos_token_id=1,
        pad_token_id=0,
        codec_config=CODEC,
    )
    model = shake(transformers.KyutaiSpeechToTextForConditionalGeneration(config))
    for name, buffer in model.named_buffers():
        if name.endswith("embed_sum"):  # its codebooks: where all are zero, every sound is the same
            buffer.normal_(0, 1e-2)
    return model


def make_sound(frames: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(3, 60, (2, 6), generator=generator)
    return {"input_ids": ids, "input_features": torch.randn(2, 8, frames, generator=generator)}


def make_waves() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    waves = torch.randn(2, 1, 640, generator=generator)
    return {"input_ids": torch.ones(2, 1, dtype=torch.long), "input_values": waves}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("length", [{}, {"max_new_tokens": 3}, {"max_new_tokens": 30}, {"max_length": 9}])
def test_a_text_ends_where_its_sound_does(length: dict[str, int], way: str) -> None:
    """A token of Voxtral Realtime stands for eight frames. Without a length of the caller's the whole sound counts."""
    model, inputs = make_voxtral(), make_sound(frames=100)  # 13 tokens
    expected = model.generate(**inputs, **length, **WAYS[way], do_sample=False)
    assert expected.shape[1] == (9 if length in ({"max_new_tokens": 3}, {"max_length": 9}) else 13)
    assert torch.equal(unspool.generate(model, **inputs, **length, **WAYS[way]), expected)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("row", [0, 1])
def test_rows_take_what_is_kept_of_their_sound_with_them(row: int, way: str) -> None:
    """A row that ends leaves the batch, and beams move: the encoder's own caches stand in objects beside the inputs."""
    model, inputs = make_voxtral(), make_sound(frames=100)
    end = int(model.generate(**inputs, do_sample=False)[row, 8])
    model.__dict__.pop("_encoder_cache", None)  # transformers' own static one, which may have other rows
    expected = model.generate(**inputs, **WAYS[way], eos_token_id=end, do_sample=False)
    assert torch.equal(unspool.generate(model, **inputs, **WAYS[way], eos_token_id=end), expected)


def test_what_goes_beyond_the_sound_is_refused() -> None:
    model = make_voxtral()
    with pytest.raises(SettingError, match=r"the prompt has 6 tokens, and the model's own rule ends a text .* at 6"):
        unspool.generate(model, **make_sound(frames=48))


def test_a_stream_of_sound_is_left_to_the_model() -> None:
    model, inputs = make_voxtral(), make_sound(frames=100)
    pieces = (piece for piece in inputs.pop("input_features").split(8, dim=-1))
    with pytest.raises(UnsupportedError, match=r"`input_features` .* is a stream"):
        unspool.generate(model, **inputs, input_features=pieces)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("window", [None, 1, 4])
def test_windows_have_the_size_in_the_models_settings(window: int | None, way: str) -> None:
    model, inputs = make_kyutai(), make_waves()
    if window is not None:
        model.generation_config.audio_window_size = window
    try:
        expected = model.generate(**inputs, **WAYS[way], do_sample=False)
        assert torch.equal(unspool.generate(model, **inputs, **WAYS[way]), expected)
    finally:
        model.generation_config.__dict__.pop("audio_window_size", None)
    assert expected.shape[1] == 11


class Ruled(transformers.LlamaForCausalLM):
    """A model that keeps a setting of the call for a part of its own, as Qwen3-Omni's talker does."""

    def _prepare_generation_config(self, generation_config: Any, **kwargs: Any) -> Any:
        made, inputs = super()._prepare_generation_config(generation_config, **kwargs)
        self.kept = (made.do_sample, made.max_new_tokens)
        return made, inputs


@pytest.mark.parametrize("settings", [{}, {"do_sample": True, "max_new_tokens": 4}])
def test_a_models_rule_is_shown_the_settings_of_the_call(settings: dict[str, Any]) -> None:
    config = transformers.LlamaConfig(
        vocab_size=20, **{name: size for name, size in SIZES.items() if name != "sliding_window"}
    )
    given, merged = {"input_ids": torch.ones(1, 2)}, unspool.GenerationConfig(**settings)
    model = Ruled(config)
    inputs, theirs = follow_settings(model, given, transformers.GenerationConfig(), merged)
    assert inputs == given
    assert model.kept == (settings.get("do_sample", False), settings.get("max_new_tokens"))
    assert find_end(model, theirs, merged, given["input_ids"], "input_ids", 2) is None


class Counting(transformers.LlamaForCausalLM):
    """A model that ends its texts itself, as Parakeet's transducers do."""

    def _get_stopping_criteria(self, *args: Any, **kwargs: Any) -> Any:
        return super()._get_stopping_criteria(*args, **kwargs)


def test_a_model_that_ends_its_texts_itself_runs_transformers_own_loop() -> None:
    sizes = {name: size for name, size in SIZES.items() if name != "sliding_window"}
    model = Counting(transformers.LlamaConfig(vocab_size=20, **sizes)).eval()
    ids = torch.tensor([[5, 6, 7]])
    expected = model.generate(ids, max_new_tokens=3, do_sample=False)
    assert torch.equal(unspool.generate(model, ids, max_new_tokens=3), expected)
    unspool.attach()
    try:
        assert torch.equal(model.generate(ids, max_new_tokens=3, do_sample=False), expected)
    finally:
        unspool.detach()


class Windowed(transformers.LlamaForCausalLM):
    """A model that makes a processor of a setting of its own, as Unlimited-OCR does."""

    def _get_logits_processor(self, generation_config: Any, *args: Any, **kwargs: Any) -> Any:
        made = super()._get_logits_processor(generation_config, *args, **kwargs)
        if (token := getattr(generation_config, "banned_first_token", None)) is not None:
            made.append(Banning(token))
        return made


class Banning(transformers.LogitsProcessor):
    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.index_fill(1, torch.tensor([self.token]), float("-inf"))


def test_a_processor_of_a_models_own_counts_where_its_settings_ask_for_it() -> None:
    sizes = {name: size for name, size in SIZES.items() if name != "sliding_window"}
    model = Windowed(transformers.LlamaConfig(vocab_size=20, **sizes)).eval()
    ids = torch.tensor([[5, 6, 7]])
    ways = {"max_new_tokens": 3, "do_sample": False, "no_repeat_ngram_size": 2}
    assert torch.equal(unspool.generate(model, ids, **ways), model.generate(ids, **ways))
    first = int(model.generate(ids, **ways)[0, 3])
    model.generation_config.banned_first_token = first
    found = unspool.generate(model, ids, **ways)
    assert torch.equal(found, model.generate(ids, **ways)) and first not in found[0, 3:].tolist()
