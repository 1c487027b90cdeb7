"""Codes of nf4 and fp4 on a GPU: the kernel beside the dequantised matrix, and models beside a CPU's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.conformance.cases import GOLDENS

import unspool
from unspool.kernels.cpu import TABLE_KINDS, TableKind, quantise_table
from unspool.models.weights import TableLinear

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CUDA = torch.device("cuda")
SAVED = Path(__file__).parents[1] / "loading" / "quantised" / "bitsandbytes" / "one_layer"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", TABLE_KINDS)
@pytest.mark.parametrize(("outputs", "inputs"), [(24, 64), (33, 544), (256, 2048)])
def test_products_are_those_of_the_numbers(kind: TableKind, dtype: torch.dtype, outputs: int, inputs: int) -> None:
    generator = torch.Generator().manual_seed(1)
    blocks = quantise_table(torch.randn(outputs, inputs, generator=generator), kind, is_nested=True)
    bias = torch.randn(outputs, generator=generator).to(CUDA, dtype)
    linear = TableLinear.of(blocks, CUDA, dtype, bias)
    assert torch.equal(linear.weight, blocks.dequantise().to(CUDA, dtype))
    for rows in (1, 2, 7, 16, 17, 64, 65, 200):
        x = torch.randn(rows, inputs, generator=generator).to(CUDA, dtype)
        exact = x.double() @ linear.weight.double().t() + bias.double()
        off = (linear(x).double() - exact).norm() / exact.norm()
        assert off < (1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "t5"])
def test_a_model_says_what_it_says_on_a_cpu(name: str) -> None:
    ids = torch.tensor([[5, 6, 7, 8], [9, 8, 7, 6]])
    models = [
        unspool.load(GOLDENS / "models" / name, device=place, quantize="nf4", dtype="float32").model
        for place in ("cpu", "cuda")
    ]
    made = [unspool.generate(model, ids.to(model.device), max_new_tokens=12).cpu() for model in models]
    assert torch.equal(*made)


def test_a_saved_model_keeps_its_codes() -> None:
    model = unspool.load(SAVED, device="cuda").model
    assert isinstance(model.weights.layers[0].up, TableLinear) and model.dtype == torch.bfloat16
    exact = unspool.load(SAVED, device="cuda", quantize=None, dtype="float32").model
    codes = unspool.load(SAVED, device="cuda", dtype="float32").model
    ids = torch.tensor([[5, 6, 7]], device=CUDA)
    made = [unspool.generate(one, ids, max_new_tokens=12, eos_token_id=None) for one in (exact, codes)]
    assert torch.equal(*made)
