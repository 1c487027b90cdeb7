"""Finding the right description, and refusing what would be computed wrongly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from unspool.errors import LoadError, UnsupportedError
from unspool.models.registry import build_model, describe
from unspool.models.weights import MemorySource

TOKENS = torch.randint(3, 97, (2, 13), generator=torch.Generator().manual_seed(0))


def test_an_architecture_is_found_by_name_or_by_type() -> None:
    assert describe({"architectures": ["Qwen2ForCausalLM"], "model_type": "other"}).name == "qwen2"
    assert describe({"model_type": "gemma3_text"}).name == "gemma3"
    assert describe({"architectures": None, "model_type": "t5"}).name == "t5"


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": ["JambaForCausalLM"], "model_type": "jamba"},
        {"architectures": ["LlamaForSequenceClassification"], "model_type": "llama"},
        {"architectures": 5, "model_type": "who"},
        {},
    ],
)
def test_an_unknown_architecture_is_refused_by_name(config: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match=r"LlamaForCausalLM.*through transformers"):
        describe(config)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("llama", {"hidden_act": "mish"}, "mish"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ("llama", {"rope_parameters": None, "rope_scaling": {"type": "longrope"}}, "longrope"),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ("qwen2", {"layer_types": ["full_attention", "chunked_attention", "full_attention"]}, "chunked"),
        ("qwen2", {"layer_types": ["full_attention", None, "full_attention"]}, "None"),
        ("gemma", {"use_bidirectional_attention": True}, "causal"),
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "residual"),
        ("gpt2", {"add_cross_attention": True}, "cross"),
    ],
)
def test_a_setting_that_is_not_built_is_refused_by_name(
    pair_of: Callable[[str], Any], name: str, changes: dict[str, Any], words: str
) -> None:
    pair = pair_of(name)
    with pytest.raises(UnsupportedError, match=words):
        build_model({**pair.config, **changes}, MemorySource(pair.weights))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": "32"}, "hidden_size"),
        ({"hidden_size": -1}, "hidden_size"),
        ({"hidden_size": 1 << 40}, "hidden_size"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "key heads"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"eos_token_id": [2, "x"]}, "eos_token_id"),
        ({"head_dim": None, "num_attention_heads": 5, "num_key_value_heads": 5}, "divides"),
        ({"rope_parameters": 7}, "rope_parameters"),
        ({"vocab_size": 96}, r"embed_tokens.weight.*\[96, 32\].*\[97, 32\]"),
        ({"num_hidden_layers": 4}, "model.layers.3.input_layernorm.weight"),
        ({"num_hidden_layers": 2}, "model.layers.2"),
        ({"intermediate_size": 40}, "gate_proj"),
    ],
)
def test_a_config_that_does_not_fit_is_refused_by_name(
    pair_of: Callable[[str], Any], changes: dict[str, Any], words: str
) -> None:
    pair = pair_of("llama")
    with pytest.raises(LoadError, match=words):
        build_model({**pair.config, **changes}, MemorySource(pair.weights))


def test_tensors_that_have_no_place_are_refused_and_buffers_are_not(pair_of: Callable[[str], Any]) -> None:
    pair = pair_of("llama")
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    build_model(pair.config, MemorySource({**pair.weights, **buffer}))
    bias = {"model.layers.0.self_attn.q_proj.bias": torch.ones(32)}
    with pytest.raises(LoadError, match=r"q_proj\.bias"):
        build_model(pair.config, MemorySource({**pair.weights, **bias}))


def test_older_and_newer_forms_of_a_config_mean_the_same(pair_of: Callable[[str], Any]) -> None:
    old_forms: dict[str, dict[str, Any]] = {
        "llama-llama3-rope": {
            "rope_theta": 10_000.0,
            "rope_scaling": {
                "type": "llama3",
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        },
        "llama-linear-rope": {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 3.0}},
        "qwen2-window": {"layer_types": None},
        "gpt_neox": {"rotary_pct": 0.5, "rotary_emb_base": 10_000},
        "phi": {"partial_rotary_factor": 0.5, "rope_theta": 10_000.0},
        "gemma3": {
            "layer_types": None,
            "sliding_window_pattern": 3,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
        },
    }
    for name, changes in old_forms.items():
        pair = pair_of(name)
        config = {key: value for key, value in pair.config.items() if key != "rope_parameters"}
        model = build_model({**config, **changes}, MemorySource(pair.weights))
        assert model.spec == pair.native.spec, name
        assert torch.equal(model(TOKENS).logits, pair.native(TOKENS).logits), name


def test_a_base_models_names_lack_the_prefix(pair_of: Callable[[str], Any]) -> None:
    pair = pair_of("gpt2")
    short = {name.removeprefix("transformer."): weight for name, weight in pair.weights.items()}
    mask = {"h.0.attn.bias": torch.ones(1, 1, 4, 4)}
    model = build_model(pair.config, MemorySource({**short, **mask}))
    assert torch.equal(model(TOKENS).logits, pair.native(TOKENS).logits)


def test_progress_ends_where_the_weights_end(pair_of: Callable[[str], Any]) -> None:
    pair, seen = pair_of("llama"), []
    build_model(pair.config, MemorySource(pair.weights), progress=lambda done, total: seen.append((done, total)))
    total = sum(weight.numel() for weight in pair.weights.values())
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_every_tensor_is_released_once_it_is_placed(pair_of: Callable[[str], Any]) -> None:
    pair, released = pair_of("gpt_neox"), []

    class Watching(MemorySource):
        def release(self, name: str) -> None:
            released.append(name)

    build_model(pair.config, Watching(pair.weights))
    assert sorted(released) == sorted(pair.weights)


def test_dtype_and_device(pair_of: Callable[[str], Any]) -> None:
    pair = pair_of("gemma")
    model = build_model(pair.config, MemorySource(pair.weights), dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16 and model.device == torch.device("cpu")
    assert model.weights.layers[0].qkv.weight.dtype == torch.bfloat16
    assert model.weights.layers[0].attn_norm.weight.dtype == torch.float32  # its weights lie close around 1
    logits = model(TOKENS).logits
    assert logits.dtype == torch.bfloat16
    exact = pair.native(TOKENS).logits
    assert float((logits.float() - exact).abs().max()) < 0.05 * float(exact.abs().max())
    back = model.to(torch.float32)
    assert back is model and model.dtype == torch.float32 and model(TOKENS).logits.dtype == torch.float32
    with pytest.raises(UnsupportedError, match="int8"):
        model.to(torch.int8)
