"""Sums over bits: the C library's beside the reference, and what they tell apart."""

from __future__ import annotations

import pytest
import torch

from unspool.errors import SettingError
from unspool.kernels.bit_sums import sum_bits, sum_by_operators
from unspool.kernels.cpu import Library, find_library

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool]


def make(dtype: torch.dtype, count: int) -> torch.Tensor:
    made = torch.randn(count, generator=torch.Generator().manual_seed(count)) * 40
    return made.to(dtype)


@pytest.mark.parametrize("size", [torch.uint8, torch.int16, torch.int32])
def test_the_library_makes_the_reference_s_sums(size: torch.dtype) -> None:
    library = find_library()
    if library is None:
        pytest.skip("no library")
    rows = [torch.randint(-(2**31), 2**31, (count,)).to(size) for count in (1, 7, 4096, 65537, 200_001)]
    expected = sum_by_operators(rows)
    before = library.instructions
    try:
        for name in library.available:
            library.use_instructions(name)
            assert library.sum_bits(rows) == expected
    finally:
        library.use_instructions(before)
    assert len(set(expected)) == len(expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_changed_number_shows_wherever_it_is(dtype: torch.dtype) -> None:
    held = make(dtype, 1000)
    known = {sum_bits([held])[0]}
    for place in (0, 1, 499, 998, 999):
        other = held.clone()
        other[place] = not other[place] if dtype is torch.bool else other[place] + 1
        known.add(sum_bits([other])[0])
    assert len(known) == 6
    assert sum_bits([held]) == sum_bits([held.clone()])


def test_signs_places_and_bits_of_nan_show() -> None:
    zeros, numbers = torch.zeros(64), torch.randn(64, 8)
    assert sum_bits([zeros]) != sum_bits([-zeros])
    assert sum_bits([numbers]) != sum_bits([-numbers])
    assert sum_bits([numbers]) != sum_bits([numbers.flip(0)])
    assert sum_bits([numbers]) != sum_bits([numbers[torch.randperm(64)]])
    nan = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32)
    assert sum_bits([nan[:1].view(torch.float32)]) != sum_bits([nan[1:].view(torch.float32)])


def test_tensors_of_any_layout_and_number() -> None:
    held = torch.randn(40, 30)
    several = [held, held.t(), held[:, 3:17], held.bfloat16(), torch.empty(0), torch.tensor(2.0), held.t()[2:9]]
    before = sum_bits(several)
    assert before == [sum_bits([one])[0] for one in several] and before[4] == 0
    assert before[0] == before[1]  # one memory
    held[20, 5] += 1
    after = sum_bits(several)
    assert [one == other for one, other in zip(before, after, strict=True)] == [False] * 3 + [True] * 3 + [False]


def test_numbers_of_several_sizes_are_refused_by_the_library() -> None:
    library: Library | None = find_library()
    if library is None:
        pytest.skip("no library")
    with pytest.raises(SettingError, match="all of one size"):
        library.sum_bits([torch.zeros(3), torch.zeros(3, dtype=torch.uint8)])
