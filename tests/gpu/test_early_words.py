"""Products of several rows with words that are on their way before the rows, beside their reference: Hopper."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.gpu.kernel_checks import DEVICE

from unspool.kernels.activations import find_activation
from unspool.kernels.cpu.blocks import quantise_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]


def make_words(numbers: torch.Tensor, kind: Any) -> Any:
    from unspool.kernels.gpu.products.words import lay_out_words, round_floats

    return round_floats(numbers) if kind == "fp8" else lay_out_words(quantise_rows(numbers, kind), DEVICE)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("manner", ["plain", "bias", "silu", "gelu", "arranged silu", "adds", "parts"])
@pytest.mark.parametrize(
    ("rows", "tile"), [(3, (8, 4, 4)), (11, (16, 8, 3)), (40, (64, 4, 4)), (64, (64, 8, 4)), (100, (64, 4, 5))]
)
def test_products_of_several_rows(
    kind: str, dtype: torch.dtype, manner: str, rows: int, tile: tuple[int, int, int]
) -> None:
    """Fewer and more tiles than there is room for, outputs that are no multiple of a program's, uneven parts."""
    from unspool.kernels.gpu.products.activations import CODES, NONE
    from unspool.kernels.gpu.products.arranging import arrange, arrange_plainly
    from unspool.kernels.gpu.products.early_words import multiply_early_words

    name = manner.removeprefix("arranged ")
    is_gated, is_arranged = name in CODES, name != manner
    outputs = 384 if is_arranged else 200
    for inputs in (128, 128 * 11, 128 * 32):
        weight = make_words(torch.randn(outputs * (1 + is_gated), inputs, device=DEVICE), kind)
        exact = weight.dequantise(torch.float32).double()
        x, out = (torch.randn(rows, width, device=DEVICE).to(dtype) for width in (inputs, outputs))
        bias = torch.randn(len(exact), device=DEVICE).to(dtype) if name in ("bias", "silu") else None
        expected = F.linear(x.double(), exact, bias.double() if bias is not None else None)
        if is_gated:
            expected = find_activation(name)(expected[:, :outputs]) * expected[:, outputs:]
        elif manner == "adds":
            expected = expected + out.double()
        order = weight.bits if is_arranged else 0
        if is_arranged:
            expected = arrange_plainly(expected, order)
        if manner != "adds":
            out.fill_(torch.nan)  # every number must be written
        settings: dict[str, Any] = {"bias": bias, "activation": CODES.get(name, NONE), "is_gated": is_gated}
        settings["order"] = order
        arranged = arrange(x, weight.bits)
        if manner == "parts":
            parts = torch.full((3, rows, outputs), torch.nan, device=DEVICE)
            multiply_early_words(weight, arranged, parts, tile, min(3, inputs // 128), **settings, adds=False)
            out = parts[: min(3, inputs // 128)].sum(0).to(dtype)
        else:
            multiply_early_words(weight, arranged, out, tile, 1, **settings, adds=manner == "adds")
        assert (out.double() - expected).norm() < 6e-3 * expected.norm()


@pytest.mark.parametrize("kind", ["int4", "int8", "fp8"])
@pytest.mark.parametrize("rows", [24, 64])
def test_a_gate_that_keeps_the_whole_gpu_busy(kind: str, rows: int) -> None:
    """As in a step: registers that the tensor cores still read must not be overwritten, however long they take."""
    from unspool.kernels.gpu.products.activations import CODES
    from unspool.kernels.gpu.products.product import find_rows_tiling, multiply

    weight = make_words(torch.randn(2 * 14336, 4096, device=DEVICE) * 0.02, kind)
    x = torch.randn(rows, 4096, device=DEVICE).bfloat16()
    tiling = find_rows_tiling(weight, x, is_gated=True)
    assert tiling is not None and tiling.is_early is (kind != "int4")  # nibbles have a faster kernel, `rows_product`
    gate, value = F.linear(x.double(), weight.dequantise(torch.float32).double()).chunk(2, 1)
    expected = F.silu(gate) * value
    for _ in range(10):
        out = torch.full((rows, 14336), torch.nan, device=DEVICE, dtype=torch.bfloat16)
        multiply(weight, x, out, activation=CODES["silu"], is_gated=True)
        assert (out.double() - expected).norm() < 6e-3 * expected.norm()
