"""Products of many rows with floats of 8 bits beside their references."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.gpu.kernel_checks import DEVICE

from unspool.kernels.gpu.products.words import round_floats, round_rows_plainly

FLOATS_FROM = (8, 9)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < FLOATS_FROM,
        reason="needs a CUDA device that multiplies floats of 8 bits",
    ),
]


@pytest.mark.parametrize("inputs", [64, 32 * 67, 14336])
def test_rows_are_rounded_as_torch_rounds_them(inputs: int) -> None:
    from unspool.kernels.gpu.products.scaled_product import round_rows

    x = torch.randn(300, inputs, device=DEVICE).bfloat16()
    x[7] = 0.0
    (found, scales), (expected, theirs) = round_rows(x), round_rows_plainly(x)
    torch.testing.assert_close(scales, theirs)
    # A quotient may lie one rounding beside torch's, and then on the other side of a tie.
    assert (found.view(torch.uint8) != expected.view(torch.uint8)).float().mean() < 1e-3
    assert found[7].float().abs().max() == 0.0


@pytest.mark.parametrize("manner", ["plain", "bias", "gated", "adds"])
def test_products_of_many_rows(manner: str) -> None:
    """As the rounded rows say; and not far from what exact rows would say."""
    from unspool.kernels.gpu.products.activations import CODES
    from unspool.kernels.gpu.products.product import multiply
    from unspool.kernels.gpu.products.scaled_product import can_scale

    rows, outputs, inputs = 300, 96, 32 * 66
    weight = round_floats(torch.randn(outputs * (2 if manner == "gated" else 1), inputs, device=DEVICE))
    exact = weight.dequantise(torch.float64)
    x, out = (torch.randn(rows, width, device=DEVICE).bfloat16() for width in (inputs, outputs))
    assert can_scale(weight, x)
    bias = torch.randn(exact.shape[0], device=DEVICE).bfloat16() if manner == "bias" else None
    before = out.double()
    settings: dict[str, Any] = {"bias": bias}
    if manner == "gated":
        settings |= {"activation": CODES["silu"], "is_gated": True}
    elif manner == "adds":
        settings["adds"] = True

    def expect(given: torch.Tensor) -> torch.Tensor:
        made = F.linear(given, exact, bias.double() if bias is not None else None)
        if manner == "gated":
            return F.silu(made[:, :outputs]) * made[:, outputs:]
        return made + before if manner == "adds" else made

    rounded, scales = round_rows_plainly(x)
    numbers = rounded.double().view(rows, -1, 8, 4).transpose(2, 3).reshape(rows, inputs) * scales.double()
    near, far = expect(numbers), expect(x.double())
    multiply(weight, x, out, **settings)
    assert (out.double() - near).norm() < 1e-2 * near.norm()
    assert (out.double() - far).norm() < 6e-2 * far.norm()
