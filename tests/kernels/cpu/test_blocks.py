"""Blocks: the nearest whole numbers, and a GGUF's own ones exactly."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quantize
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.loading.dequantizing import dequantize

from unspool.errors import LoadError
from unspool.kernels.cpu import BLOCK, Blocks, Kind, join_blocks, pack_tiles, quantise_rows, read_blocks, unpack_tiles

KINDS: tuple[Kind, ...] = ("int8", "int4")


def make_matrix(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", KINDS)
def test_quantising_is_off_by_half_a_step_at_most(kind: Kind) -> None:
    weight = make_matrix(24, 96)
    blocks = quantise_rows(weight, kind)
    off = (blocks.dequantise() - weight).abs().view(24, -1, BLOCK)
    # Half a step, and what rounding scale and minimum to float16 moves the ends by.
    allowed = blocks.scales.float()[..., None] * 0.5 + weight.abs().max() * 2e-3
    assert (off <= allowed).all()


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_exact_stays_exact(kind: Kind) -> None:
    first = quantise_rows(make_matrix(8, 64), kind)
    again = quantise_rows(first.dequantise(), "int8" if kind == "int8" else "int4")
    if kind == "int8":
        assert torch.equal(again.quants, first.quants)
    assert torch.allclose(again.dequantise(), first.dequantise(), atol=1e-2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [0.0, 1e-9, -3.0])
def test_blocks_of_one_number(kind: Kind, value: float) -> None:
    made = quantise_rows(torch.full((2, 32), value), kind).dequantise()
    assert made.isfinite().all()
    assert torch.allclose(made, torch.full((2, 32), value), atol=2e-3)


@pytest.mark.parametrize("stored", ["Q8_0", "Q5_0", "Q4_0", "Q4_1"])
def test_a_files_own_blocks_are_exact(stored: str) -> None:
    weight = make_matrix(10, 128).numpy()
    raw = torch.from_numpy(np.ascontiguousarray(quantize(weight, GGMLQuantizationType[stored])).reshape(-1))
    blocks = read_blocks(raw, stored, (10, 128))
    assert blocks is not None
    assert torch.equal(blocks.dequantise(), dequantize(raw, stored, (10, 128), torch.float32))


def test_other_formats_have_no_blocks() -> None:
    assert read_blocks(torch.zeros(176, dtype=torch.uint8), "Q5_K", (1, 256)) is None
    assert read_blocks(torch.zeros(210, dtype=torch.uint8), "Q6_K", (1, 256)) is None
    assert read_blocks(torch.zeros(34, dtype=torch.uint8), "Q8_0", (32,)) is None


@settings(max_examples=30)
@given(rows=st.integers(1, 20), blocks=st.integers(1, 4), kind=st.sampled_from(KINDS), seed=st.integers(0, 99))
def test_tiles_hold_what_was_packed(rows: int, blocks: int, kind: Kind, seed: int) -> None:
    made = quantise_rows(make_matrix(rows, blocks * BLOCK, seed), kind)
    back = unpack_tiles(pack_tiles(made), kind, rows)
    assert isinstance(back, Blocks)
    assert torch.equal(back.quants, made.quants) and torch.equal(back.scales, made.scales)
    assert (back.minimums is None) == (made.minimums is None)
    assert made.minimums is None or (back.minimums is not None and torch.equal(back.minimums, made.minimums))


def test_rows_can_be_joined_and_reordered() -> None:
    upper, lower = (quantise_rows(make_matrix(n, 64, n), "int4") for n in (3, 5))
    order = torch.tensor([7, 0, 3, 1, 2, 4, 5, 6])
    joined = join_blocks([upper, lower]).select_rows(order)
    assert torch.equal(joined.dequantise(), torch.cat([upper.dequantise(), lower.dequantise()])[order])


def test_mixed_kinds_are_refused() -> None:
    with pytest.raises(LoadError, match="int4 and int8"):
        join_blocks([quantise_rows(make_matrix(2, 32), kind) for kind in KINDS])


def test_columns_must_be_whole_blocks() -> None:
    with pytest.raises(LoadError, match="33 columns"):
        quantise_rows(torch.zeros(2, 33), "int8")


def test_kind_follows_from_minimums() -> None:
    empty = torch.zeros(1, 32, dtype=torch.uint8)
    scale = torch.zeros(1, 1, dtype=torch.float16)
    assert Blocks(empty, scale, scale).kind == "int4" and Blocks(empty.view(torch.int8), scale, None).kind == "int8"
