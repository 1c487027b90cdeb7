"""Quantised matrices and embeddings for a GPU, where no kernel is at hand: what they stand for is what counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.conformance.cases import GOLDENS

import unspool
from unspool.errors import SettingError, UnsupportedError
from unspool.kernels.cpu.blocks import Kind, quantise_rows
from unspool.loading.source import open_source
from unspool.models.registry import build_model
from unspool.models.weights import MemorySource, WordEmbedding, WordLinear, convert_tensors, iterate_tensors

CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", ["int4", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_and_rows(kind: Kind, dtype: torch.dtype) -> None:
    blocks = quantise_rows(torch.randn(24, 64), kind)
    exact, bias, x = blocks.dequantise().to(dtype), torch.randn(24).to(dtype), torch.randn(2, 3, 64).to(dtype)
    linear = WordLinear.of(blocks, CPU, dtype, bias)
    assert torch.equal(linear(x), F.linear(x, exact, bias))
    table = WordEmbedding.of(blocks, CPU, dtype)
    table.scale = 2.0
    tokens = torch.tensor([[3, 23], [0, 3]])
    assert torch.equal(table(tokens), exact[tokens] * 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_floats(dtype: torch.dtype) -> None:
    weight, bias, x = torch.randn(24, 64).to(dtype), torch.randn(24).to(dtype), torch.randn(2, 3, 64).to(dtype)
    linear = WordLinear.round(weight, bias)
    assert linear.kind == "fp8" and linear.weight.dtype == dtype
    assert torch.equal(linear(x), F.linear(x, linear.weight, bias))
    assert (linear.weight - weight).norm() < 0.04 * weight.norm()
    part = linear.part(1, 2)
    assert torch.equal(part.weight, linear.weight[12:])
    assert part.bias is not None and torch.equal(part.bias, bias[12:])


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3"])
def test_a_model_of_floats_has_the_numbers_of_the_plain_one(name: str) -> None:
    """Its matrices, in the same order of rows; embeddings and a head of its own are 8-bit blocks."""
    source = open_source(str(GOLDENS / "models" / name))
    plain, rounded = (
        build_model(source.config, source.tensors, device=CPU, packing=packing) for packing in (None, "fp8")
    )
    for mine, theirs in zip(rounded.weights.layers, plain.weights.layers, strict=True):
        for part in ("qkv", "out", "up", "down"):
            one, other = getattr(mine, part), getattr(theirs, part)
            assert isinstance(one, WordLinear) and one.kind == "fp8"
            assert (one.weight - other.weight).norm() < 0.04 * other.weight.norm()
            assert one.bias is None or torch.equal(one.bias, other.bias)
    assert rounded.weights.embedding.kind == "int8"


def test_where_there_are_no_floats(pair_of: Any) -> None:
    with pytest.raises(UnsupportedError, match="use quantize='int8' on a CPU"):
        unspool.load(GOLDENS / "models" / "llama", device="cpu", quantize="fp8")
    with pytest.raises(SettingError, match="'int8', 'int4', 'fp8'"):
        unspool.load(GOLDENS / "models" / "llama", device="cpu", quantize="fp9")
    pair = pair_of("mixtral")
    with pytest.raises(UnsupportedError, match="experts"):
        build_model(pair.config, MemorySource(pair.weights), device=CPU, packing="fp8")


def test_what_is_whole_stays_whole_when_a_model_moves() -> None:
    linear = WordLinear.of(quantise_rows(torch.randn(8, 32), "int4"), CPU, torch.float32, torch.randn(8))
    before = linear.weight
    convert_tensors(linear, CPU, torch.bfloat16)
    assert [tensor.dtype for tensor in iterate_tensors(linear)] == [torch.int32, torch.int32, torch.bfloat16]
    assert torch.equal(linear.weight, before)


def test_the_reference_s_switches(default_model_file: str) -> None:
    lm = unspool.load(default_model_file, device="cpu", load_in_8bit=True)
    assert lm.model.weights.layers[0].up.kind == "int8"
    for wrong in ({"load_in_4bit": True, "load_in_8bit": True}, {"load_in_4bit": True, "quantize": "int8"}):
        with pytest.raises(SettingError, match="give one of them"):
            unspool.load(default_model_file, **wrong)
    with pytest.raises(UnsupportedError, match="can't be moved"):
        lm.model.to(torch.bfloat16)
