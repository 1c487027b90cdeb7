from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from tests.loading.dequantizing import dequantize, random_blocks

from unspool.errors import UnsupportedError
from unspool.loading.dequantize import STORED_TYPES, find_stored_type, iterate_rows
from unspool.loading.gguf import GGUF_TYPES

QUANTISED = [name for name in GGUF_TYPES if STORED_TYPES[name].unpack is not None]


def assert_same_bits(ours: torch.Tensor, theirs: np.ndarray) -> None:
    assert tuple(ours.shape) == theirs.shape
    assert np.array_equal(ours.numpy().view(np.int32), np.ascontiguousarray(theirs).view(np.int32))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", QUANTISED)
def test_random_blocks_equal_the_gguf_package_bit_by_bit(kind: str, seed: int) -> None:
    data = random_blocks(kind, num_rows=5, blocks_per_row=3, seed=seed)
    theirs = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind])
    ours = dequantize(torch.from_numpy(data), kind, theirs.shape, torch.float32)
    assert_same_bits(ours, theirs)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantised_numbers_equal_the_gguf_package_bit_by_bit(kind: str) -> None:
    numbers = np.random.default_rng(7).standard_normal((6, 128)).astype(np.float32)
    data = gguf.quants.quantize(numbers, gguf.GGMLQuantizationType[kind])
    theirs = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind])
    ours = dequantize(torch.from_numpy(data), kind, (6, 128), torch.float32)
    assert_same_bits(ours, theirs)
    assert np.abs(ours.numpy() - numbers).max() < 0.5


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_plain_formats_equal_the_gguf_package(kind: str) -> None:
    numbers = np.random.default_rng(1).standard_normal((3, 8)).astype(np.float32)
    data = gguf.quants.quantize(numbers, gguf.GGMLQuantizationType[kind])
    theirs = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind])
    ours = dequantize(torch.from_numpy(data.view(np.uint8)), kind, (3, 8), torch.float32)
    assert_same_bits(ours, theirs)


@pytest.mark.parametrize("kind", QUANTISED)
def test_block_sizes_are_those_of_the_format(kind: str) -> None:
    stored = STORED_TYPES[kind]
    assert (stored.block_values, stored.block_bytes) == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]


@pytest.mark.parametrize("kind", QUANTISED)
def test_chunks_and_odd_addresses_change_nothing(kind: str) -> None:
    stored = STORED_TYPES[kind]
    data = random_blocks(kind, num_rows=7, blocks_per_row=2, seed=3)
    whole = dequantize(torch.from_numpy(data), kind, (7, 2 * stored.block_values), torch.float32)
    shifted = torch.empty(data.size + 1, dtype=torch.uint8)[1:]
    shifted.copy_(torch.from_numpy(data).flatten())
    parts = list(iterate_rows(shifted.view(7, -1), stored, chunk_bytes=4 * 2 * stored.block_values * 3))
    assert [first for first, _ in parts] == [0, 3, 6]
    assert torch.equal(torch.cat([part for _, part in parts]), whole)


def test_other_dtypes_are_the_float32_values_rounded() -> None:
    data = random_blocks("Q4_K", num_rows=2, blocks_per_row=1, seed=5)
    exact = dequantize(torch.from_numpy(data), "Q4_K", (2, 256), torch.float32)
    rounded = dequantize(torch.from_numpy(data), "Q4_K", (2, 256), torch.bfloat16)
    assert torch.equal(rounded, exact.to(torch.bfloat16))


def test_other_formats_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"tensor 'blk.0.w' is stored as NVFP4.*Q4_K"):
        find_stored_type("NVFP4", "blk.0.w", GGUF_TYPES)
