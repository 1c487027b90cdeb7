"""Products of matrices with what surrounds them (norms, biases, gates, sums), plain and quantised, beside torch.

They run on a GPU, or slowly in Triton's interpreter: `TRITON_INTERPRET=1 pytest tests/gpu/test_products.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.gpu.kernel_checks import DEVICE, DTYPES, HALF_DTYPES, IS_INTERPRETED, check, pytestmark, random

from unspool.kernels.activations import find_activation
from unspool.kernels.cpu.blocks import quantise_rows
from unspool.kernels.gpu.products.words import WordKind, Words, lay_out_words, round_floats
from unspool.kernels.norms import layer_norm, rms_norm

__all__ = ["pytestmark"]


MANNERS = ["plain", "norm and bias", "gated", "adds", "layer norm", "bare layer norm"]


def surround(
    manner: str, exact: torch.Tensor, x: torch.Tensor, out: torch.Tensor
) -> tuple[dict[str, Any], torch.Tensor]:
    """What stands around the product of a matrix (outputs, inputs; float64) and x, and what must come out."""
    from unspool.kernels.gpu.products.activations import CODES

    norm, bias = random(x.shape[1], dtype=x.dtype), random(exact.shape[0], dtype=x.dtype)
    settings: dict[str, Any] = {}
    wide = x.double()
    if manner in ("norm and bias", "gated"):
        settings = {"norm": norm, "eps": 1e-5, "bias": bias}
        wide = rms_norm(wide, norm.double(), 1e-5)
    if manner == "layer norm":
        shift = random(x.shape[1], dtype=x.dtype)
        settings = {"norm": norm, "shift": shift, "centres": True, "eps": 1e-5, "bias": bias}
        settings["activation"] = CODES["gelu_new"]
        wide = layer_norm(wide, norm.double(), shift.double(), 1e-5)
    if manner == "bare layer norm":
        x += 30.0  # far from its deviation
        settings = {"centres": True, "eps": 1e-5}
        wide = layer_norm(x.double(), None, None, 1e-5)
    expected = F.linear(wide, exact, bias.double() if "bias" in settings else None)
    if manner == "layer norm":
        expected = find_activation("gelu_new")(expected)
    if manner == "gated":
        settings |= {"activation": CODES["silu"], "is_gated": True}
        gate, value = expected.chunk(2, dim=1)
        expected = F.silu(gate) * value
    if manner == "adds":
        settings["adds"] = True
        expected = expected + out.double()
    if manner == "plain":
        out.fill_(torch.nan)  # every number must be written
    return settings, expected


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 3, 16])
@pytest.mark.parametrize(
    ("outputs", "inputs"), [(96, 64), (48, 200), (33, 2048)], ids=["even", "odd inputs", "odd outputs"]
)
@pytest.mark.parametrize("manner", MANNERS)
def test_products(dtype: torch.dtype, rows: int, outputs: int, inputs: int, manner: str) -> None:
    from unspool.kernels.gpu.products.product import multiply
    from unspool.kernels.gpu.products.row_product import RowTiling, multiply_row
    from unspool.kernels.gpu.products.tilings import MOST_ROWS

    weight = random(outputs * (2 if manner == "gated" else 1), inputs, dtype=dtype)
    x, out = random(rows, inputs, dtype=dtype), random(rows, outputs, dtype=dtype)
    settings, expected = surround(manner, weight.double(), x, out)
    if rows <= MOST_ROWS:
        multiply_row(weight, x, out, RowTiling(4, 256, 4), **settings)
    else:
        multiply(weight, x, out, **settings)  # cuBLAS, with kernels around it
    check(out, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("inputs", [64, 200, 1100])
@pytest.mark.parametrize("manner", ["norm and bias", "gated", "plain"])
def test_a_product_adds_to_its_input(dtype: torch.dtype, inputs: int, manner: str) -> None:
    """The sum is rounded as it is written, and the product is that of the rounded sum."""
    from unspool.kernels.gpu.products.result import Addend
    from unspool.kernels.gpu.products.row_product import RowTiling, multiply_row

    weight = random(48 * (2 if manner == "gated" else 1), inputs, dtype=dtype)
    x, made, norm = random(2, inputs, dtype=dtype), random(2, inputs, dtype=dtype), random(inputs, dtype=dtype)
    into, out = torch.full_like(x, torch.nan), random(2, 48, dtype=dtype)
    whole = x.double() + rms_norm(made.double(), norm.double(), 1e-3)
    settings, expected = surround(manner, weight.double(), whole.to(dtype), out)
    multiply_row(weight, x, out, RowTiling(4, 256, 4), addend=Addend(made, norm, 1e-3, into), **settings)
    check(into, whole, dtype)
    check(out, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("outputs", [(64, 96), (33, 50)], ids=["even", "odd"])
@pytest.mark.parametrize("manner", ["norm", "layer norm", "bare layer norm"])
@pytest.mark.parametrize("biases", [(True, True), (False, True)], ids=["biases", "one bias"])
def test_two_products_of_one_row(
    dtype: torch.dtype, outputs: tuple[int, int], manner: str, biases: tuple[bool, bool]
) -> None:
    from unspool.kernels.gpu.products.activations import CODES
    from unspool.kernels.gpu.products.parallel_product import Branch, multiply_twins
    from unspool.kernels.gpu.products.row_product import RowTiling

    inputs = 600
    x = random(1, inputs, dtype=dtype)
    branches, expected = [], []
    for count, has_bias, activation in zip(outputs, biases, ("", "gelu"), strict=True):
        weight, bias = random(count, inputs, dtype=dtype), random(count, dtype=dtype) if has_bias else None
        norm = random(inputs, dtype=dtype) if manner != "bare layer norm" else None
        shift = random(inputs, dtype=dtype) if manner == "layer norm" else None
        branches.append(Branch(weight, bias, norm, shift, CODES.get(activation, 0)))
        scale, more = (part.double() if part is not None else None for part in (norm, shift))
        wide = rms_norm(x.double(), scale, 1e-5) if manner == "norm" else layer_norm(x.double(), scale, more, 1e-5)
        made = F.linear(wide, weight.double(), bias.double() if bias is not None else None)
        expected.append(F.gelu(made) if activation else made)
    outs = tuple(torch.full((1, count), torch.nan, device=DEVICE, dtype=dtype) for count in outputs)
    multiply_twins(x, *branches, outs, RowTiling(4, 256, 4), eps=1e-5, centres=manner != "norm")
    for out, wanted in zip(outs, expected, strict=True):
        check(out, wanted, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("outputs", [64, 33])
@pytest.mark.parametrize(("biases", "ahead"), [((True, True), 1), ((False, True), 4), ((False, False), 9)])
def test_the_sum_of_two_products(dtype: torch.dtype, outputs: int, biases: tuple[bool, bool], ahead: int) -> None:
    from unspool.kernels.gpu.products.parallel_product import Branch, multiply_sum
    from unspool.kernels.gpu.products.row_product import RowTiling

    inputs, out = (600, 400), random(1, outputs, dtype=dtype)
    expected, given = out.double(), []
    for count, has_bias in zip(inputs, biases, strict=True):
        weight, bias = random(outputs, count, dtype=dtype), random(outputs, dtype=dtype) if has_bias else None
        x = random(1, count, dtype=dtype)
        given += [Branch(weight, bias), x]
        expected = expected + F.linear(x.double(), weight.double(), bias.double() if bias is not None else None)
    multiply_sum(*given, out, RowTiling(4, 256, 4, ahead=ahead))
    check(out, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("ahead", "registers"), [(2, None), (8, None), (8, 64)])
@pytest.mark.parametrize("manner", MANNERS)
def test_loading_ahead_changes_nothing(dtype: torch.dtype, ahead: int, registers: int | None, manner: str) -> None:
    from unspool.kernels.gpu.products.row_product import RowTiling, multiply_row

    outputs, inputs = 33, 700
    weight = random(outputs * (2 if manner == "gated" else 1), inputs, dtype=dtype)
    x, out = random(1, inputs, dtype=dtype), random(1, outputs, dtype=dtype)
    settings, expected = surround(manner, weight.double(), x, out)
    multiply_row(weight, x, out, RowTiling(4, 256, 4, ahead=ahead, registers=registers), **settings)
    check(out, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("inputs", [200, 2048])
@pytest.mark.parametrize("manner", MANNERS)
def test_products_of_rows_that_are_held(dtype: torch.dtype, inputs: int, manner: str) -> None:
    from unspool.kernels.gpu.products.held_product import HeldTiling, multiply_held

    weight = random(64 * (2 if manner == "gated" else 1), inputs, dtype=dtype)
    x, out = random(2, inputs, dtype=dtype), random(2, 64, dtype=dtype)
    settings, expected = surround(manner, weight.double(), x, out)
    multiply_held(weight, x, out, HeldTiling(2, 8, 4), **settings)
    check(out, expected, dtype)


@pytest.mark.skipif(IS_INTERPRETED, reason="too wide for the interpreter")
@pytest.mark.parametrize(("manner", "outputs"), [("gated", 8192), ("norm and bias", 65536)])
def test_wide_products_of_two_rows_are_held(manner: str, outputs: int) -> None:
    """The shapes that it was measured for, through the way that a step takes."""
    from unspool.kernels.gpu.products.product import multiply
    from unspool.kernels.gpu.products.tilings import choose_held_tiling

    dtype, is_gated = torch.bfloat16, manner == "gated"
    weight = random(outputs * (2 if is_gated else 1), 2048, dtype=dtype)
    assert choose_held_tiling(weight.shape[0], 2048, 2, dtype, is_gated=is_gated) is not None
    x, out = random(2, 2048, dtype=dtype), torch.empty(2, outputs, device=DEVICE)
    settings, expected = surround(manner, weight.double(), x, out)
    multiply(weight, x, out, **settings)
    check(out, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["int4", "int8", "fp8"])
@pytest.mark.parametrize("rows", [1, 2, 5, 9])
@pytest.mark.parametrize("manner", MANNERS)
def test_products_of_quantised_matrices(
    dtype: torch.dtype, kind: WordKind, rows: int, manner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From words, and from what they are unpacked to where there are many rows; no input is rounded."""
    monkeypatch.setenv("UNSPOOL_GPU_ROUNDING", "off")
    from unspool.kernels.gpu.products.product import multiply

    outputs, inputs = 45, 32 * 67
    weight = make_words(torch.randn(outputs * (2 if manner == "gated" else 1), inputs), kind)
    exact = weight.dequantise(torch.float32).double()
    x, out = random(rows, inputs, dtype=dtype), random(rows, outputs, dtype=dtype)
    settings, expected = surround(manner, exact, x, out)
    multiply(weight, x, out, **settings)
    expected = expected.double()
    error = (out.double() - expected).norm() / expected.norm()
    assert error < (2e-4 if dtype == torch.float32 else 8e-3), float(error)


def make_words(numbers: torch.Tensor, kind: WordKind) -> Words:
    """A matrix as the kernels read it."""
    if kind == "fp8":
        return round_floats(numbers.to(DEVICE))
    return lay_out_words(quantise_rows(numbers, kind), DEVICE)


def round_blocks(x: torch.Tensor) -> torch.Tensor:
    """Blocks of 32 numbers as whole numbers from -127 to 127 of their greatest."""
    blocks = x.float().view(-1, 32)
    step = blocks.abs().amax(1, keepdim=True) / 127
    return ((blocks / step).round() * step).view(x.shape)


@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
@pytest.mark.parametrize("rounds", [False, True], ids=["halves", "bytes"])
@pytest.mark.parametrize("tiling", [(8, 512, 2, 4), (4, 128, 3, 4), (2, 256, 8, 8)], ids=str)
@pytest.mark.parametrize("manner", ["plain", "norm and bias", "gated", "adds"])
def test_one_row_of_nibbles(dtype: torch.dtype, rounds: bool, tiling: tuple[int, ...], manner: str) -> None:
    """As the numbers say; where the input is rounded, exactly as the rounded input says."""
    from unspool.kernels.gpu.products.activations import CODES
    from unspool.kernels.gpu.products.nibble_product import NibbleTiling, multiply_nibbles

    outputs, inputs, is_gated = 45, 32 * 67, manner == "gated"
    blocks = quantise_rows(torch.randn(outputs * (2 if is_gated else 1), inputs) + 0.1, "int4")
    weight, exact = lay_out_words(blocks, DEVICE), blocks.dequantise().to(DEVICE).double()
    x, norm = random(1, inputs, dtype=dtype), 1 + 0.2 * random(inputs).to(dtype)
    x[0, 32:64] = 0.0  # a block of nothing
    x[0, 64:96] *= 1e-4
    bias, before = random(exact.shape[0], dtype=dtype), random(1, outputs, dtype=dtype)
    out = before.clone()
    settings, wide, root = {}, x.float(), 1.0
    if manner in ("norm and bias", "gated"):
        settings = {"norm": norm, "eps": 1e-5, "bias": bias}
        root = float(torch.rsqrt(x.double().square().mean() + 1e-5))
        wide = wide * norm.float()
    if is_gated:
        settings |= {"activation": CODES["silu"], "is_gated": True}
    if manner == "adds":
        settings["adds"] = True
    if manner == "plain":
        out.fill_(torch.nan)
    multiply_nibbles(weight, x, out, NibbleTiling(*tiling), rounds=rounds, **settings)

    def expect(given: torch.Tensor) -> torch.Tensor:
        made = F.linear(given.double().nan_to_num() * root, exact, bias.double() if "bias" in settings else None)
        if is_gated:
            made = F.silu(made[:, :outputs]) * made[:, outputs:]
        return made + (before.double() if manner == "adds" else 0.0)

    expected = expect(wide)
    size = expected.norm()
    if rounds:
        assert (out.double() - expect(round_blocks(wide))).norm() / size < 4e-3
    assert (out.double() - expected).norm() / size < (2e-2 if rounds else 5e-3)


@pytest.mark.parametrize("rounds", [False, True], ids=["halves", "bytes"])
def test_nibbles_hide_no_number_that_is_none(rounds: bool) -> None:
    from unspool.kernels.gpu.products.nibble_product import NibbleTiling, multiply_nibbles

    weight = lay_out_words(quantise_rows(torch.randn(8, 256), "int4"), DEVICE)
    for bad in (torch.nan, torch.inf):
        x, out = random(1, 256, dtype=torch.float16), random(1, 8, dtype=torch.float16)
        x[0, 77] = bad
        multiply_nibbles(weight, x, out, NibbleTiling(8, 128, 1, 4), rounds=rounds)
        assert not out.isfinite().any()


@pytest.mark.parametrize("kind", ["int4", "int8", "fp8"])
def test_unpacking(kind: WordKind) -> None:
    from unspool.kernels.gpu.products.words_product import unpack_words

    words = make_words(torch.randn(40, 32 * 40), kind)
    exact = words.dequantise(torch.float32)
    torch.testing.assert_close(unpack_words(words, torch.full_like(exact, torch.nan)), exact)
    chosen = torch.tensor([39, 0, -1, 7], device=DEVICE)  # a row that has ended reads the first
    found = unpack_words(words, exact.new_empty(4, exact.shape[1]), rows=chosen, scale=1.5)
    torch.testing.assert_close(found, 1.5 * exact[[39, 0, 0, 7]])
