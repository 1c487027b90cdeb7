"""Quantised matrices and embeddings for a GPU, where no kernel is at hand: what they stand for is what counts."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import unspool
from unspool.errors import SettingError, UnsupportedError
from unspool.kernels.cpu.blocks import Kind, quantise_rows
from unspool.models.weights import WordEmbedding, WordLinear, convert_tensors, iterate_tensors

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
