"""Products of several rows whose matrix is on its way before they are there, beside their reference: Hopper."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.gpu.kernel_checks import DEVICE

from unspool.kernels.activations import find_activation

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("manner", ["plain", "bias", "silu", "gelu", "gelu_new", "relu", "adds", "parts"])
@pytest.mark.parametrize(
    ("rows", "tile"), [(3, (8, 64, 128, 4, 4)), (11, (16, 64, 64, 4, 3)), (40, (64, 128, 64, 8, 3))]
)
def test_products_of_several_rows(
    dtype: torch.dtype, manner: str, rows: int, tile: tuple[int, int, int, int, int]
) -> None:
    """Fewer and more tiles than there is room for, outputs that are no multiple of a program's, uneven parts."""
    from unspool.kernels.gpu.products.activations import CODES, NONE
    from unspool.kernels.gpu.products.early_product import multiply_early

    is_gated, outputs = manner in CODES, 70
    for inputs in (128, 128 * 11):
        weight = torch.randn(outputs * (1 + is_gated), inputs, device=DEVICE).to(dtype)
        x, out = (torch.randn(rows, width, device=DEVICE).to(dtype) for width in (inputs, outputs))
        bias = torch.randn(len(weight), device=DEVICE).to(dtype) if manner in ("bias", "silu") else None
        expected = F.linear(x.double(), weight.double(), bias.double() if bias is not None else None)
        if is_gated:
            expected = find_activation(manner)(expected[:, :outputs]) * expected[:, outputs:]
        elif manner == "adds":
            expected = expected + out.double()
        else:
            out.fill_(torch.nan)  # every number must be written
        settings: dict[str, Any] = {"bias": bias, "activation": CODES.get(manner, NONE), "is_gated": is_gated}
        if manner == "parts":
            parts = torch.full((3, rows, outputs), torch.nan, device=DEVICE)
            multiply_early(weight, x, parts, tile, 3, **settings, adds=False)
            out = parts.sum(0).to(dtype)
        else:
            multiply_early(weight, x, out, tile, 1, **settings, adds=manner == "adds")
        assert (out.double() - expected).norm() < 6e-3 * expected.norm()


@pytest.mark.parametrize("rows", [3, 16, 64])
@pytest.mark.parametrize("manner", ["plain", "gated", "adds"])
def test_products_as_a_step_takes_them(rows: int, manner: str) -> None:
    from unspool.kernels.gpu.products.activations import CODES
    from unspool.kernels.gpu.products.product import find_rows_tiling, multiply

    weight = torch.randn(512 if manner == "gated" else 256, 256, device=DEVICE).bfloat16()
    x, out = (torch.randn(rows, 256, device=DEVICE).bfloat16() for _ in range(2))
    tiling = find_rows_tiling(weight, x, is_gated=manner == "gated", is_split=manner == "adds")
    assert (tiling is not None and tiling.is_early) or (manner == "plain" and rows > 16)
    expected, settings = F.linear(x.double(), weight.double()), {}
    if manner == "gated":
        settings = {"activation": CODES["silu"], "is_gated": True}
        expected = F.silu(expected[:, :256]) * expected[:, 256:]
    elif manner == "adds":
        settings, expected = {"adds": True}, expected + out.double()
    multiply(weight, x, out, **settings)
    assert (out.double() - expected).norm() < 6e-3 * expected.norm()


def test_a_row_without_a_number_spoils_no_other() -> None:
    from unspool.kernels.gpu.products.product import multiply

    weight, x = (torch.randn(count, 256, device=DEVICE).bfloat16() for count in (192, 5))
    x[3, 77] = torch.nan
    out = torch.empty(5, 192, device=DEVICE).bfloat16()
    multiply(weight, x, out)
    assert out[3].isnan().all() and not out[[0, 1, 2, 4]].isnan().any()
