"""Products of several rows beside their torch references, on inputs drawn afresh.

They run on a GPU, or slowly in Triton's interpreter: `TRITON_INTERPRET=1 pytest tests/gpu/test_rows_product.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.gpu.kernel_checks import DEVICE, HALF_DTYPES, pytestmark

from unspool.kernels.cpu.blocks import quantise_rows
from unspool.kernels.norms import layer_norm, rms_norm

__all__ = ["pytestmark"]

KINDS = ["plain", "int4", "int8", "fp8"]


def make_matrix(kind: str, outputs: int, inputs: int, dtype: torch.dtype) -> tuple[Any, torch.Tensor]:
    """A matrix as kernels take it, and its numbers."""
    from unspool.kernels.gpu.products.words import lay_out_words, round_floats

    numbers = torch.randn(outputs, inputs) + 0.1
    if kind == "fp8":
        words = round_floats(numbers.to(DEVICE))
        return words, words.dequantise(torch.float64)
    if kind == "plain":
        weight = numbers.to(DEVICE, dtype)
        return weight, weight.double()
    blocks = quantise_rows(numbers, kind)
    return lay_out_words(blocks, DEVICE), blocks.dequantise().to(DEVICE).double()


def arrange_for(weight: Any, x: torch.Tensor) -> torch.Tensor:
    """The rows in the order in which a product with the matrix reads them."""
    from unspool.kernels.gpu.products.arranging import arrange

    return x if isinstance(weight, torch.Tensor) else arrange(x, weight.bits)


def find_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.skipif(DEVICE.type != "cuda", reason="many programs at once, on a GPU")
@pytest.mark.parametrize("rows", [8, 32, 64, 200])
@pytest.mark.parametrize("is_gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("kind", ["int4", "int8", "fp8"])
def test_programs_that_share_a_processor(kind: str, rows: int, is_gated: bool) -> None:
    """Heads have ten times as many programs as there are processors, and the tensor cores are late then."""
    from unspool.kernels.gpu.products.activations import CODES, NONE
    from unspool.kernels.gpu.products.rows_product import multiply_rows
    from unspool.kernels.gpu.products.rows_tilings import choose_rows_tiling

    outputs, inputs = 2**16, 1024
    weight, exact = make_matrix(kind, outputs, inputs, torch.bfloat16)
    tiling = choose_rows_tiling(outputs, inputs, rows, kind, is_gated=is_gated)
    assert tiling is not None
    x = torch.randn(rows, inputs, device=DEVICE, dtype=torch.bfloat16)
    expected = F.linear(x.double(), exact)
    if is_gated:
        expected = F.silu(expected[:, : outputs // 2]) * expected[:, outputs // 2 :]
    activation = CODES["silu"] if is_gated else NONE
    for _ in range(8):
        out = torch.full(expected.shape, torch.nan, device=DEVICE, dtype=torch.bfloat16)
        multiply_rows(weight, arrange_for(weight, x), out, tiling, activation=activation, is_gated=is_gated)
        assert find_error(out, expected) < 0.01


@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("manner", "tiling", "blocks"),
    [
        ("plain", (8, 64, 32, 1, 4, 3), 64),
        ("bias", (16, 64, 64, 1, 4, 2), 67),
        ("gated", (8, 64, 32, 1, 4, 3), 67),
        ("adds", (64, 128, 32, 1, 8, 2), 64),
    ],
    ids=["plain", "bias, odd", "gated, odd", "adds"],
)
def test_products_of_several_rows(
    dtype: torch.dtype, kind: str, manner: str, tiling: tuple[int, ...], blocks: int
) -> None:
    """More rows than a program takes or fewer, and outputs that are no multiple of its own."""
    from unspool.kernels.gpu.products.activations import CODES
    from unspool.kernels.gpu.products.rows_product import RowsTiling, multiply_rows

    outputs, inputs, rows = 70, 32 * blocks, 11
    weight, exact = make_matrix(kind, outputs * (2 if manner == "gated" else 1), inputs, dtype)
    x = torch.randn(rows, inputs, device=DEVICE).to(dtype)
    out = torch.randn(rows, outputs, device=DEVICE).to(dtype)
    bias = torch.randn(exact.shape[0], device=DEVICE).to(dtype) if manner in ("bias", "gated") else None
    expected = F.linear(x.double(), exact, bias.double() if bias is not None else None)
    settings: dict[str, Any] = {"bias": bias}
    if manner == "gated":
        settings |= {"activation": CODES["silu"], "is_gated": True}
        expected = F.silu(expected[:, :outputs]) * expected[:, outputs:]
    elif manner == "adds":
        settings["adds"] = True
        expected = expected + out.double()
    if manner != "adds":
        out.fill_(torch.nan)  # every number must be written
    multiply_rows(weight, arrange_for(weight, x), out, RowsTiling(*tiling), **settings)
    assert find_error(out, expected) < 6e-3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("splits", [2, 5])
def test_parts_add_up(kind: str, splits: int) -> None:
    """Columns that are split unevenly, and the sum with bias and residual."""
    from unspool.kernels.gpu.products.parts import add_parts
    from unspool.kernels.gpu.products.rows_product import RowsTiling, multiply_rows

    dtype = HALF_DTYPES[-1]
    weight, exact = make_matrix(kind, 48, 32 * 67, dtype)
    x, bias = torch.randn(3, 32 * 67, device=DEVICE).to(dtype), torch.randn(48, device=DEVICE).to(dtype)
    parts = torch.full((splits, 3, 48), torch.nan, device=DEVICE)
    multiply_rows(weight, arrange_for(weight, x), parts, RowsTiling(8, 64, 32, splits, 4, 3))
    expected = F.linear(x.double(), exact)
    assert find_error(parts.double().sum(0), expected) < 4e-3
    out = torch.randn(3, 48, device=DEVICE).to(dtype)
    expected = expected + bias.double() + out.double()
    add_parts(parts, out, bias=bias, adds=True)
    assert find_error(out, expected) < 6e-3


@pytest.mark.parametrize("manner", ["rms", "layer", "bare"])
@pytest.mark.parametrize("width", [64, 200])
def test_parts_and_the_norm_after_them(manner: str, width: int) -> None:
    """The norm is that of the rounded sum, which is written too."""
    from unspool.kernels.gpu.products.parts import add_parts

    dtype = HALF_DTYPES[-1]
    parts, x = torch.randn(3, 5, width, device=DEVICE), torch.randn(5, width, device=DEVICE).to(dtype)
    norm, shift = (torch.randn(width, device=DEVICE).to(dtype) for _ in range(2))
    total = x.double() + parts.double().sum(0)
    normed = torch.full_like(x, torch.nan)
    settings: dict[str, Any] = {"rms": {"norm": norm}, "layer": {"norm": norm, "shift": shift}, "bare": {}}[manner]
    add_parts(parts, x, adds=True, normed=normed, eps=1e-5, centres=manner != "rms", **settings)
    assert find_error(x, total) < 6e-3
    if manner == "rms":
        expected = rms_norm(x.double(), norm.double(), 1e-5)
    else:
        has_weight = manner == "layer"
        weights = (norm.double(), shift.double()) if has_weight else (None, None)
        expected = layer_norm(x.double(), *weights, 1e-5)
    assert find_error(normed, expected) < 6e-3


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_without_a_number_spoils_no_other(kind: str) -> None:
    from unspool.kernels.gpu.products.rows_product import RowsTiling, multiply_rows

    dtype = HALF_DTYPES[-1]
    weight, exact = make_matrix(kind, 64, 256, dtype)
    x, out = torch.randn(4, 256, device=DEVICE).to(dtype), torch.empty(4, 64, device=DEVICE)
    x[2, 77] = torch.nan
    multiply_rows(weight, arrange_for(weight, x), out, RowsTiling(8, 64, 32, 1, 4, 3))
    assert out[2].isnan().all()
    kept = [0, 1, 3]
    assert find_error(out[kept], F.linear(x[kept].double(), exact)) < 6e-3


@pytest.mark.parametrize("blocks", [64, 67], ids=["whole groups", "odd"])
@pytest.mark.parametrize("bits", [4, 8])
def test_arranged_rows(bits: int, blocks: int) -> None:
    """By themselves, after a norm, after a sum of parts, and as a product's output."""
    from unspool.kernels.gpu.products.arranging import arrange, arrange_plainly
    from unspool.kernels.gpu.products.norms import normalise
    from unspool.kernels.gpu.products.parts import add_parts
    from unspool.kernels.gpu.products.rows_product import RowsTiling, multiply_rows

    dtype, width = HALF_DTYPES[-1], 32 * blocks
    x, norm = (torch.randn(rows, width, device=DEVICE).to(dtype) for rows in (3, 1))
    expected = arrange_plainly(x, bits)
    assert torch.equal(arrange(x, bits), expected)
    plain, arranged = torch.empty_like(x), torch.full_like(x, torch.nan)
    normalise(x, norm[0], 1e-5, plain)
    normalise(x, norm[0], 1e-5, arranged, order=bits)
    assert torch.equal(arranged, arrange_plainly(plain, bits))
    arranged.fill_(torch.nan)
    add_parts(x.float()[None], torch.empty_like(x), normed=arranged, norm=norm[0], eps=1e-5, order=bits)
    assert torch.equal(arranged, arrange_plainly(plain, bits))
    weight = torch.randn(width, 64, device=DEVICE).to(dtype)
    given, arranged = x[:, :64].contiguous(), arranged.fill_(torch.nan)
    multiply_rows(weight, given, plain, RowsTiling(8, 64, 32, 1, 4, 2))
    multiply_rows(weight, given, arranged, RowsTiling(8, 64, 32, 1, 4, 2), order=bits)
    assert torch.equal(arranged, arrange_plainly(plain, bits))


@pytest.mark.parametrize("kind", ["int4", "int8", "fp8"])
@pytest.mark.parametrize("rows", [2, 40])
@pytest.mark.parametrize("manner", ["norm", "gated", "adds"])
@pytest.mark.parametrize(("outputs", "blocks"), [(96, 9), (128, 8)], ids=["odd", "whole groups"])
def test_quantised_products_as_a_step_takes_them(kind: str, rows: int, manner: str, outputs: int, blocks: int) -> None:
    """Through `multiply` rows are given and written as they are, unless arranged ones are asked for."""
    from unspool.kernels.gpu.products.activations import CODES
    from unspool.kernels.gpu.products.arranging import arrange_plainly
    from unspool.kernels.gpu.products.product import find_order, multiply

    dtype, inputs = HALF_DTYPES[-1], 32 * blocks
    weight, exact = make_matrix(kind, outputs * (2 if manner == "gated" else 1), inputs, dtype)
    x, norm = (torch.randn(count, inputs, device=DEVICE).to(dtype) for count in (rows, 1))
    assert find_order(weight, x) == weight.bits
    out = torch.randn(rows, outputs, device=DEVICE).to(dtype)
    expected, settings = F.linear(x.double(), exact), {}
    if manner == "norm":
        settings = {"norm": norm[0], "eps": 1e-5}
        expected = F.linear(rms_norm(x.double(), norm[0].double(), 1e-5), exact)
    elif manner == "gated":
        settings = {"activation": CODES["silu"], "is_gated": True, "order": weight.bits}
        expected = arrange_plainly(F.silu(expected[:, :outputs]) * expected[:, outputs:], weight.bits)
    else:
        settings, expected = {"adds": True}, expected + out.double()
    multiply(weight, x, out, **settings)
    assert find_error(out, expected) < 6e-3


@pytest.mark.skipif(DEVICE.type != "cuda", reason="a large matrix, on a GPU")
@pytest.mark.parametrize("rows", [3, 12, 24, 64, 65, 130, 256, 300])
@pytest.mark.parametrize("outputs", [20_001, 51_866])
@pytest.mark.parametrize("has_bias", [False, True])
def test_heads_of_uneven_numbers_of_tokens(outputs: int, rows: int, has_bias: bool) -> None:
    """Their logits are as exact as those of other heads: not rounded to 16 bits, with a bias or without."""
    from unspool.kernels.gpu.products.product import find_rows_tiling, multiply

    weight = torch.randn(outputs, 384, device=DEVICE).bfloat16()
    x = torch.randn(rows, 384, device=DEVICE).bfloat16()
    bias = torch.randn(outputs, device=DEVICE).bfloat16() if has_bias else None
    out = torch.empty(rows, outputs, device=DEVICE)
    multiply(weight, x, out, bias=bias)
    expected = x.double() @ weight.double().t()
    if bias is not None:
        expected += bias.double()
    if rows <= 256:
        assert find_rows_tiling(weight, x) is not None
        assert find_error(out, expected) < 1e-5
    else:
        assert find_error(out, expected) < 4e-3  # cuBLAS'
