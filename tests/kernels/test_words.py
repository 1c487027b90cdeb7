"""Quantised matrices in the GPU's layout: the numbers stay what the blocks say."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unspool.errors import SettingError
from unspool.kernels.cpu.blocks import Kind, quantise_rows
from unspool.kernels.gpu.products.words import SWITCH, deal_floats, lay_out_words, round_floats, rounds_inputs

CPU = torch.device("cpu")


@settings(max_examples=30)
@given(
    rows=st.integers(1, 9), blocks=st.integers(1, 5), kind=st.sampled_from(["int4", "int8"]), seed=st.integers(0, 2**31)
)
def test_the_numbers_are_those_of_the_blocks(rows: int, blocks: int, kind: Kind, seed: int) -> None:
    weight = torch.randn(rows, 32 * blocks, generator=torch.Generator().manual_seed(seed))
    packed = quantise_rows(weight, kind)
    words = lay_out_words(packed, CPU)
    assert words.shape == (rows, 32 * blocks)
    assert words.words.numel() * 32 == weight.numel() * (4 if kind == "int4" else 8)
    assert torch.equal(words.dequantise(torch.float32), packed.dequantise())


@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_rows_can_be_chosen(kind: Kind) -> None:
    words = lay_out_words(quantise_rows(torch.randn(12, 64), kind), CPU)
    whole = words.dequantise(torch.float32)
    assert torch.equal(words.narrow(3, 4).dequantise(torch.float32), whole[3:7])
    assert torch.equal(words.select(torch.tensor([11, 0, 0]), torch.float32), whole[[11, 0, 0]])


@settings(max_examples=30)
@given(rows=st.integers(1, 9), blocks=st.integers(1, 5), size=st.floats(1e-6, 1e4), seed=st.integers(0, 2**31))
def test_floats_are_those_of_torch(rows: int, blocks: int, size: float, seed: int) -> None:
    weight = torch.randn(rows, 32 * blocks, generator=torch.Generator().manual_seed(seed)) * size
    words = round_floats(weight)
    assert words.shape == weight.shape and words.factors.shape == (rows, 1)
    scales = words.factors.view(torch.float16).float()
    expected = (weight / scales).to(torch.float8_e4m3fn)
    assert (weight / scales).abs().max() <= 448
    assert torch.equal(words.dequantise(torch.float32), expected.float() * scales)
    # What a product in 8 bits takes: the same bytes, in the order in which its input is dealt out.
    assert torch.equal(words.words.view(torch.uint8), deal_floats(expected.view(torch.uint8)))
    assert (words.dequantise(torch.float32) - weight).norm() < 0.04 * weight.norm()


def test_floats_of_a_row_of_nothing() -> None:
    weight = torch.zeros(2, 64)
    weight[1, 5] = 3.0
    assert torch.equal(round_floats(weight).dequantise(torch.float32)[0], weight[0])
    chosen = round_floats(weight)
    assert torch.equal(chosen.narrow(1, 1).dequantise(torch.float32), chosen.dequantise(torch.float32)[1:])
    assert torch.equal(chosen.select(torch.tensor([1, 0]), torch.float32), chosen.dequantise(torch.float32)[[1, 0]])


def test_rounding_is_switched_by_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SWITCH, raising=False)
    assert rounds_inputs()
    monkeypatch.setenv(SWITCH, "off")
    assert not rounds_inputs()
    monkeypatch.setenv(SWITCH, "maybe")
    with pytest.raises(SettingError, match="neither 'on' nor 'off'"):  # while weights are loaded
        lay_out_words(quantise_rows(torch.randn(2, 32), "int4"), torch.device("cpu"))
