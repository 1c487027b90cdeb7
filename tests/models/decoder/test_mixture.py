"""Mixtures of experts: layouts of checkpoints, quantised experts, MXFP4, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import unspool
from unspool.errors import LoadError, UnsupportedError
from unspool.kernels import mx
from unspool.models.adapters.kept import find_kept
from unspool.models.registry import build_model
from unspool.models.weights import MemorySource, PackedLinear

MIXTURES = ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe", "glm4_moe", "gpt_oss"]
TOKENS = torch.randint(3, 97, (3, 11), generator=torch.Generator().manual_seed(0))


def read_logits(model: Any) -> torch.Tensor:
    return model(TOKENS).logits


@pytest.mark.parametrize("name", MIXTURES)
def test_an_object_s_layout_equals_a_file_s(pair_of: Callable[[str], Any], name: str) -> None:
    """Files have a matrix for each expert, objects of transformers 5 one tensor for all."""
    pair = pair_of(name)
    inside = {key: value.clone() for key, value in pair.reference.state_dict().items()}
    assert any(value.dim() == 3 for value in inside.values())
    native = build_model(pair.config, MemorySource(inside))
    assert torch.equal(read_logits(native), read_logits(pair.native))


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "olmoe", "granitemoe", "gpt_oss"])
def test_an_object_runs_natively_on_its_own_experts(pair_of: Callable[[str], Any], name: str) -> None:
    used = pair_of(name).reference  # transformers leaves hooks in it once it has returned hidden states
    reference = type(used)(used.config).eval()
    reference.load_state_dict(used.state_dict())
    told: dict[str, Any] = {"max_new_tokens": 6, "eos_token_id": None, "return_dict_in_generate": True}
    ours = unspool.generate(reference, TOKENS, native=True, **told)
    theirs = reference.generate(TOKENS, do_sample=False, **told)
    assert ours.sequences.tolist() == theirs.sequences.tolist()
    native = find_kept(reference)["native"].native
    if name != "gpt_oss":  # whose matrices are stored the other way round
        parameters = {parameter.data_ptr() for parameter in reference.parameters()}
        assert native.weights.layers[0].down.weight.data_ptr() in parameters


@pytest.mark.parametrize("bits", ["int8", "int4"])
@pytest.mark.parametrize("name", ["qwen2_moe", "qwen3_moe", "granitemoe", "gpt_oss"])
def test_quantised_experts(pair_of: Callable[[str], Any], name: str, bits: Any) -> None:
    """Experts' numbers are off by less than a step, and the library's passes equal those of operators."""
    pair = pair_of(name)
    model = build_model(dict(pair.config), MemorySource(pair.weights), packing=bits)
    found = next(layer.up for layer in model.weights.layers if layer.mixture is not None)
    plain_up = next(layer.up for layer in pair.native.weights.layers if layer.mixture is not None)
    assert isinstance(found, PackedLinear)
    step = float(plain_up.weight.abs().max()) * (1 / 127 if bits == "int8" else 2 / 15)
    assert float((found.weight - plain_up.weight).abs().max()) < 0.51 * step
    library = model.forward(TOKENS, model.new_cache(rows=3)).logits
    with model.without_paths("library"):
        plain = model.forward(TOKENS, model.new_cache(rows=3)).logits
    size = float(plain.abs().max())
    assert float((library - plain).abs().max()) < 1e-4 * size


@pytest.mark.parametrize("name", MIXTURES)
def test_greedy_tokens_are_those_of_transformers(pair_of: Callable[[str], Any], name: str) -> None:
    pair = pair_of(name)
    told: dict[str, Any] = {"max_new_tokens": 8, "eos_token_id": None, "do_sample": False}
    mask = torch.ones_like(TOKENS)
    mask[1, :4] = 0
    ours = unspool.generate(pair.native, TOKENS, attention_mask=mask, **told)
    theirs = pair.reference.generate(TOKENS, attention_mask=mask, **told)
    assert ours.tolist() == theirs.tolist()


def test_more_chosen_than_there_are() -> None:
    with pytest.raises(LoadError, match="chooses 9"):
        build_model({**_CONFIG, "num_experts_per_tok": 9}, MemorySource({}))


def test_sizes_are_bounded() -> None:
    with pytest.raises(LoadError, match="num_local_experts"):
        build_model({**_CONFIG, "num_local_experts": 1 << 40}, MemorySource({}))


def test_a_compiled_step_is_refused(pair_of: Callable[[str], Any]) -> None:
    with pytest.raises(UnsupportedError, match="chooses experts"):
        pair_of("mixtral").native.compiled(unspool.CompileConfig())


# --- MXFP4 -----------------------------------------------------------------------------------------------


def make_blocks(rows: int, columns: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (rows, columns // 32, 16), dtype=torch.uint8, generator=generator)
    return blocks, torch.randint(115, 130, (rows, columns // 32), dtype=torch.uint8, generator=generator)


def test_four_bit_floats_have_their_values() -> None:
    blocks = torch.tensor([[[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE, *[0] * 8]]], dtype=torch.uint8)
    scales = torch.tensor([[128]], dtype=torch.uint8)
    sizes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    expected = [2 * one for one in [*sizes, *(-size for size in sizes), *[0] * 16]]
    assert mx.dequantise(blocks, scales).tolist() == [expected]


def test_words_and_bytes_are_the_same_numbers() -> None:
    blocks, scales = make_blocks(24, 96)
    expected = mx.dequantise(blocks, scales)
    assert torch.equal(mx.arrange(blocks, scales).dequantise(torch.float32), expected)
    wide = mx.widen(blocks, scales)
    assert wide is not None and torch.equal(wide.dequantise(), expected)
    assert mx.widen(blocks, torch.full_like(scales, 3)) is None  # a power of two that no float16 has


def test_experts_of_four_bits_are_kept(pair_of: Callable[[str], Any]) -> None:
    """A file of MXFP4 blocks gives the logits of its dequantised numbers, and holds them in 8 bits."""
    pair = pair_of("gpt_oss")
    hidden, inner, experts = 32, 64, 5
    config = {**pair.config, "intermediate_size": inner}
    packed, plain = dict(pair.weights), dict(pair.weights)
    for layer in range(config["num_hidden_layers"]):
        start = f"model.layers.{layer}.mlp.experts."
        for name, outputs, inputs in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)):
            blocks, scales = make_blocks(experts * outputs, inputs, layer)
            scales = scales // 16 + 115
            bias = torch.randn(experts, outputs, generator=torch.Generator().manual_seed(layer))
            numbers = mx.dequantise(blocks, scales).view(experts, outputs, inputs)
            for weights in (packed, plain):
                weights.pop(start + name)
                weights[f"{start}{name}_bias"] = bias
            plain[start + name] = numbers.transpose(1, 2).contiguous()
            packed[f"{start}{name}_blocks"] = blocks.view(experts, outputs, -1, 16)
            packed[f"{start}{name}_scales"] = scales.view(experts, outputs, -1)
    expected = build_model(config, MemorySource(plain))
    method = {"quant_method": "mxfp4", "modules_to_not_convert": []}
    model = build_model({**config, "quantization_config": method}, MemorySource(packed))
    assert isinstance(model.weights.layers[0].up, PackedLinear)
    for native in (model, expected):
        native.paths = []  # the library rounds activations beside quantised numbers
    found, wanted = read_logits(model), read_logits(expected)
    assert float((found - wanted).abs().max()) < 0.02 * float(wanted.abs().max())


def test_other_quantised_files_are_refused() -> None:
    config = {**_CONFIG, "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"]}
    with pytest.raises(UnsupportedError, match="quantization_config"):
        build_model({**config, "quantization_config": {"quant_method": "awq"}}, MemorySource({}))


_CONFIG: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
