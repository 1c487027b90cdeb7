"""Every Triton kernel beside its torch reference, on inputs drawn afresh.

They run on a GPU, or slowly in Triton's interpreter: `TRITON_INTERPRET=1 pytest tests/gpu/test_kernels.py`.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from unspool.kernels.activations import find_activation
from unspool.kernels.alibi import alibi_slopes
from unspool.kernels.attention import attend
from unspool.kernels.cpu.blocks import quantise_rows
from unspool.kernels.gpu.products.words import WordKind, Words, lay_out_words, round_floats
from unspool.kernels.norms import layer_norm, rms_norm
from unspool.kernels.rotary import RotaryTable, rotate_

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # the interpreter counts with numpy
    pytest.mark.skipif(
        not torch.cuda.is_available() and not IS_INTERPRETED, reason="needs a CUDA device or Triton's interpreter"
    ),
]
# Triton's interpreter knows no bfloat16 in every operation; a GPU does.
DTYPES = [torch.float32] if not torch.cuda.is_available() else [torch.float32, torch.bfloat16, torch.float16]
HALF_DTYPES = [torch.float16] + ([torch.bfloat16] if torch.cuda.is_available() else [])


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def check(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, *, largest_score: float = 0.0) -> None:
    """The error's size beside the result's, as float64 has it; a weight is as exact as its score in float32."""
    expected = expected.double()
    error = (found.double() - expected).norm() / expected.norm()
    allowed = (1e-5 if dtype == torch.float32 else 6e-3) + largest_score * torch.finfo(torch.float32).eps
    assert error < allowed, float(error)


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
@pytest.mark.parametrize("biases", [(True, True), (False, True), (False, False)])
def test_the_sum_of_two_products(dtype: torch.dtype, outputs: int, biases: tuple[bool, bool]) -> None:
    from unspool.kernels.gpu.products.parallel_product import Branch, multiply_sum
    from unspool.kernels.gpu.products.row_product import RowTiling

    inputs, out = (600, 200), random(1, outputs, dtype=dtype)
    expected, given = out.double(), []
    for count, has_bias in zip(inputs, biases, strict=True):
        weight, bias = random(outputs, count, dtype=dtype), random(outputs, dtype=dtype) if has_bias else None
        x = random(1, count, dtype=dtype)
        given += [Branch(weight, bias), x]
        expected = expected + F.linear(x.double(), weight.double(), bias.double() if bias is not None else None)
    multiply_sum(*given, out, RowTiling(4, 256, 4))
    check(out, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ahead", [2, 8])
@pytest.mark.parametrize("manner", MANNERS)
def test_loading_ahead_changes_nothing(dtype: torch.dtype, ahead: int, manner: str) -> None:
    from unspool.kernels.gpu.products.row_product import RowTiling, multiply_row

    outputs, inputs = 33, 700
    weight = random(outputs * (2 if manner == "gated" else 1), inputs, dtype=dtype)
    x, out = random(1, inputs, dtype=dtype), random(1, outputs, dtype=dtype)
    settings, expected = surround(manner, weight.double(), x, out)
    multiply_row(weight, x, out, RowTiling(4, 256, 4, ahead=ahead), **settings)
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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["silu", "relu", "gelu", "gelu_new", "quick_gelu", "relu2"])
def test_gating(dtype: torch.dtype, name: str) -> None:
    from unspool.kernels.gpu.products.activations import CODES
    from unspool.kernels.gpu.products.gating import gate

    up, out = random(3, 2 * 1500, dtype=dtype), torch.full((3, 1500), torch.nan, device=DEVICE, dtype=dtype)
    gate(up, CODES[name], out)
    wide = up.double()
    check(out, find_activation(name)(wide[:, :1500]) * wide[:, 1500:], dtype)
    gate(up[:, :1500].contiguous(), CODES[name], out)
    check(out, find_activation(name)(wide[:, :1500]), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("adds", [False, True])
def test_norms(dtype: torch.dtype, adds: bool) -> None:
    from unspool.kernels.gpu.products.norms import normalise

    x, weight, out = random(3, 600, dtype=dtype), random(600, dtype=dtype), random(3, 600, dtype=dtype)
    expected = rms_norm(x.double(), weight.double(), 1e-6) + (out.double() if adds else 0.0)
    normalise(x, weight, 1e-6, out, adds=adds)
    check(out, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_weights", [False, True])
def test_layer_norms(dtype: torch.dtype, has_weights: bool) -> None:
    """In place, and of numbers far from zero."""
    from unspool.kernels.gpu.products.norms import normalise

    x, weight, shift = random(3, 600, dtype=dtype) + 50.0, random(600, dtype=dtype), random(600, dtype=dtype)
    weights = (weight, shift) if has_weights else (None, None)
    expected = layer_norm(x.double(), *(part.double() if part is not None else None for part in weights), 1e-6)
    normalise(x, weights[0], 1e-6, x, centres=True, shift=weights[1])
    check(x, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_layer", [False, True], ids=["rms", "layer"])
@pytest.mark.parametrize("span", ["head", "each", "whole"])
def test_norms_of_heads(dtype: torch.dtype, is_layer: bool, span: Any) -> None:
    from unspool.kernels.gpu.attention.head_norms import HeadNorm, norm_heads_

    heads, kv_heads, width = 6, 2, 24
    qkv = random(3, (heads + 2 * kv_heads) * width, dtype=dtype)
    parts = qkv.double().split([heads * width, kv_heads * width, kv_heads * width], dim=1)
    norms, expected = [], []
    for part, count in zip(parts[:2], (heads, kv_heads), strict=True):
        size = width if span == "head" else count * width
        weight, shift = random(size, dtype=dtype), random(size, dtype=dtype) if is_layer else None
        norms.append(HeadNorm(weight, shift, 1e-5, is_layer))
        by_part = part.view(3, 1 if span == "whole" else count, -1)
        normed = (
            F.layer_norm(by_part, by_part.shape[-1:], eps=1e-5)
            if is_layer
            else rms_norm(by_part, torch.ones(by_part.shape[-1], dtype=torch.float64, device=DEVICE), 1e-5)
        )
        normed = normed * weight.double().view(-1, by_part.shape[-1])
        expected.append((normed + (shift.double().view(-1, by_part.shape[-1]) if shift is not None else 0)).flatten(1))
    norm_heads_(qkv, *norms, heads, kv_heads, width, span)
    check(qkv, torch.cat((*expected, parts[2]), 1), dtype)


@pytest.mark.parametrize("is_forked", [False, True])
def test_learned_positions(is_forked: bool) -> None:
    from unspool.kernels.gpu.sampling.tokens import LearnedPositions, embed

    tokens, table, positions = torch.tensor([3, 9, 0, 5], device=DEVICE), random(10, 1200), random(20, 1200)
    lengths, out = torch.tensor([16, 4], device=DEVICE, dtype=torch.int32), torch.full((4, 1200), torch.nan)
    out = out.to(DEVICE)
    embed(tokens, table, 2.0, out, LearnedPositions(positions, 2, lengths, is_forked))
    places = [18, 18, 6, 6] if is_forked else [18, 19, 6, 7]
    torch.testing.assert_close(out, 2.0 * table[tokens] + positions[places])


@pytest.mark.parametrize("vocab", [50, 4096, 9000])
def test_the_ends_of_a_step(vocab: int) -> None:
    from unspool.kernels.gpu.sampling.tokens import count_tiles, embed, take_highest

    tokens = torch.tensor([7, 0, vocab - 1, -1, 3], device=DEVICE)
    table, out = random(vocab, 1100), torch.full((5, 1100), torch.nan, device=DEVICE)
    embed(tokens, table, 1.5, out)
    torch.testing.assert_close(out, 1.5 * table[tokens.clamp(min=0)])
    logits = random(5, vocab)
    logits[1, [vocab // 2, vocab - 1]] = 50.0  # the first of equals
    logits[2] = -torch.inf  # none is possible
    logits[3, 5] = torch.nan
    lengths = torch.tensor([4, 0, 9, -1, 3], device=DEVICE, dtype=torch.int32)
    tops = torch.empty(5, count_tiles(vocab), device=DEVICE)
    given = logits.clone()
    take_highest(logits, tops, tokens, lengths, None)
    assert tokens.tolist() == [int(given[0].argmax()), vocab // 2, -1, -1, int(given[4].argmax())]
    assert lengths.tolist() == [5, 1, 10, -1, 4]
    take_highest(logits, tops, tokens, lengths, 30.0)
    torch.testing.assert_close(logits[[0, 4]], torch.tanh(given[[0, 4]] / 30.0) * 30.0)


def make_rope(width: int, pairs: int) -> tuple[RotaryTable, torch.Tensor]:
    frequencies = [10_000.0 ** (-2 * i / width) for i in range(pairs)]
    return RotaryTable(frequencies, 1.0, DEVICE), torch.tensor(frequencies, device=DEVICE)


def tell_addresses(base: torch.Tensor, *caches: list[torch.Tensor]) -> list[int]:
    """A table as `StepAttention` reads it, of layers' buffers (rows, capacity, 2, heads, width)."""
    told: list[int] = []
    for buffers in caches:
        told += [(one.data_ptr() - base.data_ptr()) // (8 * one.element_size()) for one in buffers]
        told.append(buffers[0].shape[1])
    return told


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "pairs"),
    [(4, 2, 16, 8), (8, 8, 64, 32), (32, 8, 128, 64), (6, 2, 80, 16), (4, 1, 96, 48), (8, 4, 256, 128), (4, 4, 32, 0)],
    ids=str,
)
@pytest.mark.parametrize("manner", ["plain", "window", "softcap and norm", "slopes"])
def test_attention(dtype: torch.dtype, heads: int, kv_heads: int, width: int, pairs: int, manner: str) -> None:
    """Ragged rows from nothing held to many splits; one of them is not there."""
    from unspool.kernels.gpu.attention.split_attention import HeadShape
    from unspool.kernels.gpu.attention.step_attention import StepAttention
    from unspool.kernels.gpu.attention.turning import find_turns

    if not torch.cuda.is_available() and width > 80:
        pytest.skip("too slow in the interpreter")
    held = [0, 1, 63, 64, 130, 700, -1]
    rows, capacity, window, eps = len(held), 720, 100, 1e-6
    has_norm, softcap = manner == "softcap and norm", 5.0 if manner == "softcap and norm" else None
    scale = width**-0.5
    buffers = [random(rows, capacity, 2, kv_heads, width, dtype=dtype) for _ in range(2)]
    expected_buffer = buffers[1].clone()
    qkv = random(rows, (heads + 2 * kv_heads) * width, dtype=dtype)
    given = qkv.clone()
    norms = (random(width, dtype=dtype), random(width, dtype=dtype)) if has_norm else (None, None)
    slopes = alibi_slopes(heads).to(DEVICE) if manner == "slopes" else None
    shape = HeadShape(heads, kv_heads, width, scale, softcap, window if manner == "window" else None, eps)
    step = StepAttention(rows, shape, DEVICE)
    base = torch.zeros(16, device=DEVICE, dtype=dtype)
    table = torch.tensor(tell_addresses(base, buffers), device=DEVICE)
    lengths = torch.tensor(held, device=DEVICE, dtype=torch.int32)
    out = torch.full((rows, heads * width), torch.nan, device=DEVICE, dtype=dtype)
    rope, frequencies = make_rope(width, pairs)
    turns = torch.empty(rows, 2, pairs, device=DEVICE) if pairs else None
    if turns is not None:
        find_turns(lengths, frequencies, 1.0, turns)
    for _ in range(2):  # what is left behind must not matter
        step(
            qkv, out, base, table, lengths, 1, 2,
            turns=turns, is_windowed=manner == "window",
            q_norm=norms[0], k_norm=norms[1], slopes=slopes,
        )  # fmt: skip
    for row, length in enumerate(held):
        if length < 0:
            assert out[row].isnan().all() and torch.equal(buffers[1][row], expected_buffer[row])
            continue
        split = given[row].float().view(1, 1, heads + 2 * kv_heads, width)
        if has_norm:
            split[:, :, :heads] = rms_norm(split[:, :, :heads], norms[0].float(), eps)
            split[:, :, heads:-kv_heads] = rms_norm(split[:, :, heads:-kv_heads], norms[1].float(), eps)
        if pairs:
            rotate_(split[:, :, : heads + kv_heads], rope.reserve(length + 1)[None, length : length + 1, None])
        keys = expected_buffer[row, :length].float()
        keys = (
            torch.cat((keys, split[:, :, heads:].view(1, 2, kv_heads, width)))[max(0, length + 1 - window) :]
            if manner == "window"
            else torch.cat((keys, split[:, :, heads:].view(1, 2, kv_heads, width)))
        )
        mask = None
        if slopes is not None:
            mask = (slopes[:, None] * torch.arange(keys.shape[0], device=DEVICE))[None, :, None].double()
        k, v = (part.transpose(0, 1)[None].double() for part in keys.unbind(1))
        read, _ = attend(split[:, :, :heads].transpose(1, 2).double(), k, v, scale=scale, mask=mask, softcap=softcap)
        check(out[row], read.reshape(-1), dtype, largest_score=0.0 if mask is None else float(mask.max()))
        check(buffers[1][row, length], split[:, :, heads:].reshape(2, kv_heads, width), dtype)
        rest = [at for at in range(capacity) if at != length]
        assert torch.equal(buffers[1][row, rest], expected_buffer[row, rest])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_over_keys_that_were_brought(dtype: torch.dtype) -> None:
    """What was brought is read and left alone; the new key goes to where the layer lives."""
    from unspool.kernels.gpu.attention.split_attention import HeadShape
    from unspool.kernels.gpu.attention.step_attention import StepAttention
    from unspool.kernels.key_layout import KeyLayout

    heads, kv_heads, width, held = 4, 2, 16, [3, 40]
    brought = [random(2, 64, 2, kv_heads, width, dtype=dtype) for _ in range(2)]
    homes = [torch.zeros_like(buffer) for buffer in brought]
    before = [buffer.clone() for buffer in brought]
    qkv, base = random(2, (heads + 2 * kv_heads) * width, dtype=dtype), torch.zeros(16, device=DEVICE, dtype=dtype)
    table = torch.tensor([*tell_addresses(base, brought), *tell_addresses(base, homes)[:-1]], device=DEVICE)
    lengths = torch.tensor(held, device=DEVICE, dtype=torch.int32)
    step = StepAttention(2, HeadShape(heads, kv_heads, width, 0.25), DEVICE)
    found = []
    for layout in (KeyLayout(is_away=True), KeyLayout()):  # the second writes into what was brought
        out = torch.full((2, heads * width), torch.nan, device=DEVICE, dtype=dtype)
        step(qkv, out, base, table, lengths, 1, 2, layout=layout)
        found.append(out)
        if layout.is_away:
            assert all(map(torch.equal, brought, before)) and not homes[0].any()
    check(found[0], found[1], dtype)
    for row, length in enumerate(held):
        assert torch.equal(homes[1][row, length], brought[1][row, length])
        assert int(homes[1][row].flatten(1).any(1).sum()) == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 100])
def test_attention_of_branches(dtype: torch.dtype, window: int | None) -> None:
    """Rows share their prompt's keys, and find their own at the rows that wrote them."""
    from unspool.kernels.gpu.attention.split_attention import HeadShape
    from unspool.kernels.gpu.attention.step_attention import StepAttention
    from unspool.kernels.key_layout import KeyLayout

    heads, kv_heads, width, branches, prompts = 8, 2, 64, 3, [5, 200]
    num_own, capacity, rows = 70, 90, branches * len(prompts)
    own = [random(rows, capacity, 2, kv_heads, width, dtype=dtype) for _ in range(2)]
    shared = [random(len(prompts), 256, 2, kv_heads, width, dtype=dtype) for _ in range(2)]
    ancestry = torch.stack(
        [torch.randint(row // branches * branches, row // branches * branches + branches, (96,)) for row in range(rows)]
    ).to(DEVICE, torch.int32)
    qkv = random(rows, (heads + 2 * kv_heads) * width, dtype=dtype)
    base = torch.zeros(16, device=DEVICE, dtype=dtype)
    firsts = [prompts[row // branches] for row in range(rows)]
    lengths = torch.tensor([first + num_own for first in firsts], device=DEVICE, dtype=torch.int32)
    from_lengths = (ancestry.data_ptr() - lengths.data_ptr()) // 4
    told = [*tell_addresses(base, own, shared), from_lengths, ancestry.shape[1], *firsts]
    table = torch.tensor(told, device=DEVICE)
    before = own[0].clone()
    out = torch.full((rows, heads * width), torch.nan, device=DEVICE, dtype=dtype)
    step = StepAttention(rows, HeadShape(heads, kv_heads, width, 0.1, None, window), DEVICE)
    step(
        qkv, out, base, table, lengths, 0, 2,
        is_windowed=window is not None, layout=KeyLayout(branches),
    )  # fmt: skip
    for row, first in enumerate(firsts):
        new = qkv[row].view(1, -1, width)
        mine = before[ancestry[row, :num_own].long(), torch.arange(num_own, device=DEVICE)]
        kv = torch.cat((shared[0][row // branches, :first], mine, new[:, heads:].view(1, 2, kv_heads, width)))
        kv = kv[-window:] if window else kv
        k, v = (part.transpose(0, 1)[None].double() for part in kv.unbind(1))
        read, _ = attend(new[:, :heads].transpose(0, 1)[None].double(), k, v, scale=0.1)
        check(out[row], read.reshape(-1), dtype)
        assert torch.equal(own[0][row, num_own].view(-1), qkv[row, heads * width :])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "new", "is_shared"), [(1, 70, False), (3, 5, False), (4, 9, True)])
def test_rotated_heads(dtype: torch.dtype, rows: int, new: int, is_shared: bool) -> None:
    from unspool.kernels.gpu.attention.rotating import rotate_heads_

    heads, kv_heads, width = 12, 4, 32
    qkv = random(rows, new, heads + 2 * kv_heads, width, dtype=dtype)
    table = RotaryTable([10000.0 ** (-2 * place / 24) for place in range(12)], 1.5, DEVICE).reserve(500)  # 24 of 32
    positions = torch.randint(0, 500, (1 if is_shared else rows, new), device=DEVICE)
    factors = table[positions].unsqueeze(2)
    expected = qkv.float()
    rotate_(expected[:, :, : heads + kv_heads], factors)
    rotate_heads_(qkv[:, :, : heads + kv_heads], factors)
    check(qkv, expected, dtype)
    torch.testing.assert_close(
        qkv[:, :, heads + kv_heads :].float(), expected[:, :, heads + kv_heads :], rtol=0, atol=0
    )
