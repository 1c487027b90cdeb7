"""GGUF headers and names: the same weights under llama.cpp's conventions give the same logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import gguf
import pytest
import torch

from unspool.errors import LoadError, UnsupportedError
from unspool.models.registry import build_model, describe_gguf
from unspool.models.weights import MemorySource

Weights = dict[str, torch.Tensor]


def interleave(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """What llama.cpp's converter does to q and k of the llama architecture."""
    shape = weight.shape
    return weight.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).transpose(1, 2).reshape(shape)


def stack(weight: torch.Tensor, heads: int, kv_heads: int) -> torch.Tensor:
    """What it does to fused q, k and v that lie group by group."""
    parts = weight.reshape(kv_heads, heads // kv_heads + 2, -1, *weight.shape[1:])
    q, k, v = parts[:, :-2], parts[:, -2], parts[:, -1]
    return torch.cat([part.reshape(-1, *weight.shape[1:]) for part in (q, k, v)])


def change(name: str, weight: torch.Tensor, arch: str, config: Any) -> torch.Tensor:
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if arch == "llama" and ("q_proj" in name or "k_proj" in name):
        return interleave(weight, heads if "q_proj" in name else kv_heads)
    if "query_key_value" in name and (arch != "falcon" or config.new_decoder_architecture):
        return stack(weight, heads, kv_heads)
    if arch.startswith("gemma") and "norm" in name:
        return weight + 1
    if arch == "gpt2" and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
        return weight.t()
    return weight


def convert(pair: Any, arch: str) -> Weights:
    """A transformers checkpoint under GGUF's names."""
    config = pair.native.config
    kind = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == arch)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    converted = {}
    for name, weight in pair.weights.items():
        short = name.removeprefix("transformer.")  # as BLOOM's first files have it
        found = next(filter(None, (names.get_name(n, try_suffixes=(".weight", ".bias")) for n in (name, short))), None)
        if found is None:
            assert name == "lm_head.weight" or "embed_out" in name, name
            found = "output.weight"
        converted[found] = change(name, weight, arch, config)
    return converted


def header(pair: Any, arch: str, **more: Any) -> dict[str, Any]:
    config = pair.native.config
    values = {
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "context_length": 64,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.layer_norm_epsilon": 1e-5,
        **more,
    }
    return {
        "general.architecture": arch,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.bos_token_id": 1,
        **{f"{arch}.{key}": value for key, value in values.items()},
    }


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"rope.freq_base": 10_000.0, "rope.dimension_count": 8}),
    "llama-tied-biased": ("llama", {"attention.head_count": [4, 4, 4]}),
    "llama-linear-rope": (
        "llama",
        {"rope.freq_base": 500.0, "rope.scaling.type": "linear", "rope.scaling.factor": 3.0},
    ),
    "llama-yarn": (
        "llama",
        {
            "attention.key_length": 16,
            "attention.value_length": 16,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 16,
        },
    ),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"attention.key_length": 16, "attention.value_length": 16}),
    "gemma": ("gemma", {"attention.key_length": 8}),
    "gpt2": ("gpt2", {}),
    "gpt_neox": ("gptneox", {"rope.dimension_count": 4, "use_parallel_residual": True}),
    "bloom": ("bloom", {}),
    "phi": ("phi2", {"rope.dimension_count": 4}),
    "falcon-7b": ("falcon", {}),
    "falcon-40b": ("falcon", {}),
}


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_those_of_the_same_weights_in_safetensors(pair_of: Callable[[str], Any], name: str) -> None:
    pair, (arch, more) = pair_of(name), MODELS[name]
    model = build_model(header(pair, arch, **more), MemorySource(convert(pair, arch)), is_gguf=True)
    tokens = torch.randint(3, 97, (2, 13), generator=torch.Generator().manual_seed(0))
    expected = pair.native(tokens).logits
    assert float((model(tokens).logits - expected).abs().max()) < 1e-5 * float(expected.abs().max())
    assert (model.info.eos_token_id, model.info.bos_token_id) == (2, 1)
    assert model.num_parameters() == pair.native.num_parameters()


EXPERTS = {
    "mixtral": ("llama", {"feed_forward_length": 48}),
    "qwen2_moe": ("qwen2moe", {}),
    "qwen3_moe": ("qwen3moe", {"attention.key_length": 16, "attention.value_length": 16}),
    "olmoe": ("olmoe", {}),
}
SHARED = {"gate_proj": "ffn_gate_shexp", "up_proj": "ffn_up_shexp", "down_proj": "ffn_down_shexp"}


def convert_experts(pair: Any, arch: str) -> Weights:
    """A mixture under GGUF's names: a tensor for each of the experts' three matrices."""
    inner = pair.native.spec.mixture.ffn_size
    converted, others = {}, {}
    for name, weight in pair.reference.state_dict().items():
        layer, _, part = name.removeprefix("model.layers.").partition(".mlp.")
        if part == "experts.gate_up_proj":
            converted[f"blk.{layer}.ffn_gate_exps.weight"] = weight[:, :inner].contiguous()
            converted[f"blk.{layer}.ffn_up_exps.weight"] = weight[:, inner:].contiguous()
        elif part == "experts.down_proj":
            converted[f"blk.{layer}.ffn_down_exps.weight"] = weight
        elif part == "gate.weight":
            converted[f"blk.{layer}.ffn_gate_inp.weight"] = weight
        elif part == "shared_expert_gate.weight":
            converted[f"blk.{layer}.ffn_gate_inp_shexp.weight"] = weight[0]
        elif part.startswith("shared_expert."):
            converted[f"blk.{layer}.{SHARED[part.split('.')[1]]}.weight"] = weight
        elif part:  # of a layer without experts, which llama.cpp's own converter does not expect here
            converted[f"blk.{layer}.{SHARED[part.split('.')[0]].removesuffix('_shexp')}.weight"] = weight
        else:
            others[name] = weight
    return converted | convert(replace(pair, weights=others), arch)


@pytest.mark.parametrize("name", EXPERTS)
def test_experts(pair_of: Callable[[str], Any], name: str) -> None:
    pair, (arch, more) = pair_of(name), EXPERTS[name]
    mixture = pair.native.spec.mixture
    more = {
        "expert_count": mixture.num_experts,
        "expert_used_count": mixture.num_chosen,
        "expert_feed_forward_length": mixture.ffn_size,
        "attention.layer_norm_rms_epsilon": pair.native.spec.norm.eps,
        "rope.freq_base": pair.config["rope_parameters"]["rope_theta"],
        **more,
    }
    model = build_model(header(pair, arch, **more), MemorySource(convert_experts(pair, arch)), is_gguf=True)
    tokens = torch.randint(3, 97, (2, 13), generator=torch.Generator().manual_seed(0))
    assert model.spec.mixture == mixture
    expected = pair.native(tokens).logits
    assert float((model(tokens).logits - expected).abs().max()) < 1e-5 * float(expected.abs().max())


@pytest.mark.parametrize("generation", [2, 3])
def test_later_gemmas(pair_of: Callable[[str], Any], generation: int) -> None:
    pair = pair_of(f"gemma{generation}")
    # A header can't say how wide a query's scale or how long the pattern of windows is: both are known
    # by the number of layers, so the comparison is with a config that says the same.
    config = {**pair.config, "query_pre_attn_scalar": 8, "layer_types": None, "sliding_window_pattern": 6}
    expected_model = build_model(config, MemorySource(pair.weights))
    arch = f"gemma{generation}"
    more = {"attention.key_length": 8, "attention.value_length": 8, "attention.sliding_window": 5}
    if generation == 2:
        more |= {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    else:
        more |= {"rope.freq_base": 1e6}
    model = build_model(header(pair, arch, **more), MemorySource(convert(pair, arch)), is_gguf=True)
    tokens = torch.randint(3, 97, (2, 13), generator=torch.Generator().manual_seed(0))
    expected = expected_model(tokens).logits
    assert float((model(tokens).logits - expected).abs().max()) < 1e-5 * float(expected.abs().max())


def test_rope_factors_in_the_file_are_llama3s_scaling(pair_of: Callable[[str], Any]) -> None:
    pair, plain = pair_of("llama-llama3-rope"), pair_of("llama")
    factors = torch.tensor(plain.native.spec.rope.frequencies) / torch.tensor(pair.native.spec.rope.frequencies)
    weights = {**convert(pair, "llama"), "rope_freqs.weight": factors}
    model = build_model(header(pair, "llama"), MemorySource(weights), is_gguf=True)
    tokens = torch.randint(3, 97, (1, 13), generator=torch.Generator().manual_seed(0))
    expected = pair.native(tokens).logits
    assert float((model(tokens).logits - expected).abs().max()) < 1e-5 * float(expected.abs().max())


def test_what_a_header_may_not_say(pair_of: Callable[[str], Any]) -> None:
    pair = pair_of("llama")
    source = MemorySource(convert(pair, "llama"))
    for more, error, words in (
        ({"expert_count": 8}, LoadError, "expert_used_count"),
        ({"expert_count": 8, "expert_used_count": 9}, LoadError, "chooses 9"),
        ({"rope.scaling.type": "longrope"}, UnsupportedError, "longrope"),
        ({"attention.head_count_kv": [1, 2, 2]}, UnsupportedError, "head_count_kv"),
        ({"attention.value_length": 4}, UnsupportedError, "values"),
        ({"embedding_length": "wide"}, LoadError, "embedding_length"),
        ({"embedding_length": 0}, LoadError, "embedding_length"),
        ({"attention.layer_norm_rms_epsilon": float("nan")}, LoadError, "epsilon"),
        ({"block_count": None}, LoadError, "block_count"),
        ({"block_count": 4}, LoadError, "blk.3.attn_norm.weight"),
    ):
        with pytest.raises(error, match=words):
            build_model(header(pair, "llama", **more), source, is_gguf=True)
    with pytest.raises(UnsupportedError, match=r"mpt.*llama"):
        describe_gguf({"general.architecture": "mpt"})
