"""MT19937 as torch's CPU generator seeds and reads it: the numbers behind green lists and sampling tables.

They are computed here instead of by torch, so that every device and every version of torch has the same ones.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from unspool.kernels.cpu import find_marks
from unspool.kernels.presence import runs_kernels

SEED_BITS = (1 << 32) - 1  # of a 64-bit seed, torch gives the twister the low half


def draw_words(seed: int, count: int) -> npt.NDArray[np.uint32]:
    """The first `count` 32-bit numbers after `manual_seed(seed)`."""
    words: npt.NDArray[np.uint32] = np.random.RandomState(seed & SEED_BITS).randint(
        0, 1 << 32, size=count, dtype=np.uint32
    )
    return words


def draw_bits(seed: int, count: int) -> torch.Tensor:
    """What `torch.randint(0, 2, (count,))` draws on a CPU after `manual_seed(seed)`: (count,) int64."""
    return torch.from_numpy((draw_words(seed, count) & 1).astype(np.int64))


def permute(seed: int, count: int) -> torch.Tensor:
    """What `torch.randperm(count)` gives on a CPU after `manual_seed(seed)`."""
    if count < 2:
        return torch.arange(count)
    place = np.arange(count - 1, dtype=np.int64)
    swaps = _find_swaps(seed, count, count - 1).astype(np.int64)
    came_from = np.full(count, -1, dtype=np.int64)
    is_moved = swaps != place
    came_from[swaps[is_moved]] = place[is_moved]
    start = np.where(came_from < 0, np.arange(count), came_from)  # followed to its end: what a place holds at its turn
    while not np.array_equal(start, further := start[start]):
        start = further
    by_swap = np.argsort(swaps, kind="stable")
    before = np.full(count - 1, -1, dtype=np.int64)  # the swap before that took from the same place
    is_same = swaps[by_swap[1:]] == swaps[by_swap[:-1]]
    before[by_swap[1:][is_same]] = by_swap[:-1][is_same]
    first = np.where(swaps == place, start[place], np.where(before < 0, swaps, start[before]))
    last = start[count - 1]
    return torch.from_numpy(np.concatenate((first, [last])))


def list_first(seeds: list[int], count: int, num_first: int) -> torch.Tensor:
    """For each seed of 32 bits, which of `count` tokens are among the first so many of its permutation, as bits:
    (seeds, words of 32 tokens) int32."""
    marks = find_marks()
    if marks is not None:
        return marks.list_first(seeds, count, num_first)
    packed = np.zeros((len(seeds), -(-count // 32) * 4), dtype=np.uint8)
    for row, seed in zip(packed, seeds, strict=True):
        row[: -(-count // 8)] = np.packbits(_mark_first(seed, count, num_first), bitorder="little")
    return torch.from_numpy(packed.view("<i4").astype(np.int32))


def are_first(seeds: torch.Tensor, tokens: torch.Tensor, count: int, num_first: int) -> torch.Tensor:
    """Whether each token is among the first so many of its own seed's permutation of `count`: (seeds,) bool."""
    if runs_kernels(seeds.device):
        from unspool.kernels.gpu.marks import own_lists  # Triton is imported where a GPU is used

        return own_lists.are_first(seeds, tokens, count, num_first)
    device = seeds.device
    seeds, tokens = seeds.cpu(), tokens.cpu()
    marks = find_marks()
    if marks is not None:
        return marks.are_first(seeds, tokens, count, num_first).to(device)
    found = [
        _is_first(int(seed), int(token), count, num_first)
        for seed, token in zip(seeds.tolist(), tokens.tolist(), strict=True)
    ]
    return torch.tensor(found, dtype=torch.bool, device=device)


def _find_swaps(seed: int, count: int, num_first: int) -> npt.NDArray[np.int32]:
    """Which place each of the first places is swapped with, in the order of the shuffle."""
    place = np.arange(num_first, dtype=np.uint32)
    drawn = draw_words(seed, num_first)
    swaps: npt.NDArray[np.int32] = (place + drawn % (np.uint32(count) - place)).astype(np.int32)
    return swaps


def _mark_first(seed: int, count: int, num_first: int) -> npt.NDArray[np.bool_]:
    """The shuffle without its order: a place past the first ones holds what came there last, and that, followed from
    swap to swap back to where it began, is a token that is not among them."""
    swaps, place = _find_swaps(seed, count, num_first), np.arange(num_first, dtype=np.int32)
    came_from = np.full(count, -1, dtype=np.int32)
    is_moved = swaps != place
    came_from[swaps[is_moved]] = place[is_moved]  # of several, the last
    is_first = np.ones(count, dtype=np.bool_)
    at = np.arange(num_first, count, dtype=np.int32)
    while at.size:
        before = came_from[at]
        is_first[at[before < 0]] = False
        at = before[before >= 0]
    return is_first


def _is_first(seed: int, token: int, count: int, num_first: int) -> bool:
    """Follow one token through the shuffle."""
    swaps = _find_swaps(seed, count, num_first)
    at, begin = token, 0
    while True:
        if (swaps[begin : min(at, num_first)] == at).any():  # taken to one of the first places, which is final
            return True
        if at >= num_first:
            return False
        if swaps[at] == at:
            return True
        at, begin = int(swaps[at]), at + 1
