"""Codes of nf4 and fp4: the nearest numbers, and products straight from codes without a rounding of activations."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from unspool.errors import LoadError, SettingError
from unspool.kernels.cpu import (
    TABLE_KINDS,
    Library,
    TableKind,
    join_blocks,
    pack_tiles,
    quantise_rows,
    quantise_table,
    read_table,
    spread_sizes,
    unpack_tiles,
)
from unspool.kernels.cpu.structures import describe_matrix
from unspool.kernels.table_words import lay_out_tables
from unspool.models.weights import PackedLinear, TableLinear, convert_tensors, iterate_tensors

kinds = pytest.mark.parametrize("kind", TABLE_KINDS)


def random(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


@kinds
def test_numbers_are_rounded_to_the_nearest_of_the_table(kind: TableKind) -> None:
    weight = random(6, 64)
    made = quantise_table(weight, kind, is_nested=False)
    sizes = weight.abs().amax(1, keepdim=True)
    table = read_table(kind)
    nearest = table[(weight[..., None] / sizes[..., None] - table).abs().argmin(-1)]
    assert torch.equal(made.dequantise(), nearest * sizes)
    again = quantise_table(made.dequantise(), kind, is_nested=False)
    assert torch.equal(again.dequantise(), made.dequantise())


@kinds
def test_sizes_of_blocks_in_8_bits(kind: TableKind) -> None:
    """A size moves by half a step of the 8-bit type at most: 0.007 of the farthest one from their mean."""
    weight = random(300, 96)
    exact, nested = (quantise_table(weight, kind, is_nested=is_nested) for is_nested in (False, True))
    assert torch.equal(exact.nibbles, nested.nibbles)
    most = (exact.scales - exact.scales.mean()).abs().max()
    assert 0 < (exact.scales - nested.scales).abs().max() < 0.0142 * most
    assert not torch.equal(exact.scales, nested.scales)


def test_zeros_and_tiny_numbers() -> None:
    weight = torch.zeros(2, 64)
    weight[1, 3] = -1e-40
    for kind in TABLE_KINDS:
        made = quantise_table(weight, kind, is_nested=False).dequantise()
        assert made.isfinite().all() and made.abs().max() <= 2e-40


def test_sizes_that_end_within_a_row() -> None:
    """64 numbers share a size over the ends of rows of 96 columns."""
    scales = spread_sizes(torch.arange(1.0, 4.0), 64, (2, 96))
    assert scales is not None and scales.tolist() == [[1, 1, 2], [2, 3, 3]]
    assert spread_sizes(torch.ones(5), 64, (7, 40)) is None
    with pytest.raises(LoadError, match="whole blocks"):
        quantise_table(torch.ones(2, 40), "nf4", is_nested=False)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 20), st.sampled_from(TABLE_KINDS), st.integers(0, 9))
def test_products_are_those_of_the_numbers(
    library: Library, rows: int, groups: int, count: int, kind: TableKind, seed: int
) -> None:
    blocks = quantise_table(random(rows, 32 * groups, seed), kind, is_nested=True)
    exact = blocks.dequantise()
    assert torch.equal(unpack_tiles(pack_tiles(blocks), kind, rows).dequantise(), exact)
    x, bias = random(count, 32 * groups, seed + 1), random(1, rows, seed + 2)[0]
    linear = PackedLinear.of(blocks, bias=bias)
    expected = torch.nn.functional.linear(x.double(), exact.double(), bias.double())
    best = library.instructions
    try:
        for name in library.available:
            library.use_instructions(name)
            made = linear(x)
            assert (made - expected).norm() <= 1e-6 * expected.norm()
            assert torch.equal(linear(x[-1:]), made[-1:])  # a row alone has the bits that it has among others
            assert torch.equal(library.read_rows(linear.matrix, torch.arange(rows)), exact)
    finally:
        library.use_instructions(best)


def test_tables_don_t_stand_beside_whole_numbers() -> None:
    table, whole = quantise_table(random(16, 32), "nf4", is_nested=False), quantise_rows(random(8, 32), "int8")
    with pytest.raises(LoadError, match="int8 and nf4"):
        join_blocks([table, whole])
    rest = PackedLinear.of(whole).matrix
    with pytest.raises(SettingError, match="can't follow"):
        describe_matrix(pack_tiles(table), None, "nf4", 24, 32, rest)


@kinds
def test_words_of_a_gpu_stand_for_the_same_numbers(kind: TableKind) -> None:
    blocks = quantise_table(random(12, 96), kind, is_nested=True)
    assert torch.equal(lay_out_tables(blocks, torch.device("cpu")).dequantise(torch.float32), blocks.dequantise())
    linear = TableLinear.of(blocks, torch.device("cpu"), torch.float32, random(1, 12)[0])
    x = random(5, 96)
    assert torch.allclose(linear(x), torch.nn.functional.linear(x, blocks.dequantise(), linear.bias))
    assert torch.equal(linear.part(1, 3).weight, blocks.dequantise()[4:8])
    convert_tensors(linear, torch.device("cpu"), torch.bfloat16)
    assert [tensor.dtype for tensor in iterate_tensors(linear)] == [torch.int32, torch.int32, torch.bfloat16]
    assert torch.equal(linear.weight, blocks.dequantise())
