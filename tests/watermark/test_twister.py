from __future__ import annotations

import pytest
import torch

from unspool.watermark import twister

CASES = [(160, 40, 5), (160, 1, 0), (997, 996, 15485863 * 77), (2, 1, 3), (49152, 12288, 2**63 + 12345), (5, 2, 2**32)]
CASES += [(70001, 69000, 77), (65536, 65535, 5), (65537, 16384, 2**31)]  # tokens in 16 bits and in 32, few at the end


def find_first(seeds: list[int], count: int, num_first: int) -> torch.Tensor:
    """Which tokens are among the first: (seeds, count) bool."""
    bits, tokens = twister.list_first(seeds, count, num_first), torch.arange(count)
    return (bits[:, tokens // 32] >> tokens % 32) & 1 != 0


def shuffle(seed: int, count: int) -> torch.Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("count", "num_first", "seed"), CASES)
def test_first_of_a_permutation_are_torch_s(count: int, num_first: int, seed: int) -> None:
    first = shuffle(seed, count)[:num_first]
    expected = torch.zeros(count, dtype=torch.bool).index_fill(0, first, True)
    found = find_first([seed & twister.SEED_BITS, 9], count, num_first)
    assert torch.equal(found[0], expected)
    assert found[1].sum() == num_first


@pytest.mark.parametrize(("count", "num_first", "seed"), CASES)
def test_single_tokens_are_found_as_in_the_whole_list(count: int, num_first: int, seed: int) -> None:
    tokens = torch.arange(0, count, max(1, count // 100))
    seeds = (seed + tokens * 7919) & twister.SEED_BITS
    found = twister.are_first(seeds, tokens, count, num_first)
    masks = find_first(seeds[:20].tolist(), count, num_first)
    assert found[:20].tolist() == [bool(mask[token]) for mask, token in zip(masks, tokens[:20], strict=True)]
    same = twister.are_first(torch.full_like(tokens, seed & twister.SEED_BITS), tokens, count, num_first)
    assert torch.equal(same, find_first([seed & twister.SEED_BITS], count, num_first)[0][tokens])


def test_whole_permutations_and_bits_are_torch_s() -> None:
    assert torch.equal(twister.permute(7919, 1003), shuffle(7919, 1003))
    generator = torch.Generator().manual_seed(2**40 + 3)
    assert torch.equal(twister.draw_bits(2**40 + 3, 5000), torch.randint(0, 2, (5000,), generator=generator))


def test_no_seeds_are_no_lists() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    assert twister.list_first([], 10, 3).shape == (0, 1)
    assert twister.are_first(none, none, 10, 3).shape == (0,)
