"""Green lists on the device that marks: torch's CPU permutation, computed there.

A list is the first part of `torch.randperm` on a CPU: MT19937's words, one after the other, choose the swaps of a
shuffle. The words of a seed come 227 at a time, as many as do not need each other; a program of 128 threads computes
them in a ring of 1,024 words. The reference is `watermark.twister`. Nothing waits for the host.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from unspool.kernels.gpu.launching import launch, launch_options, let_next_start, wait_for_input

TILE: Final = 1_024  # scores per program
CHAINS: Final = 256  # places that are followed at once
RING: Final = 1_024  # words: 624 of the state, and those that are written while it is read
LANES: Final = 256  # 227 of them work


@triton.jit
def _seed(WORDS, seed):
    """Write the first 624 words of a seed's state."""
    word = seed.to(tl.uint32)
    tl.store(WORDS, word.to(tl.int32, bitcast=True))
    for number in range(1, 624):
        word = (word ^ (word >> 30)) * 1812433253 + number
        tl.store(WORDS + number, word.to(tl.int32, bitcast=True))
    tl.debug_barrier()


@triton.jit
def _turn(WORDS, at, is_there):
    """The words number `at`, from 227 places on after what the ring holds; they are written into the ring."""
    high = tl.load(WORDS + (at & 1023), mask=is_there, other=0).to(tl.uint32, bitcast=True)
    low = tl.load(WORDS + ((at + 1) & 1023), mask=is_there, other=0).to(tl.uint32, bitcast=True)
    word = tl.load(WORDS + ((at + 397) & 1023), mask=is_there, other=0).to(tl.uint32, bitcast=True)
    both = (high & 0x80000000) | (low & 0x7FFFFFFF)
    word = word ^ (both >> 1) ^ ((both & 1) * 0x9908B0DF)
    tl.store(WORDS + ((at + 624) & 1023), word.to(tl.int32, bitcast=True), mask=is_there)
    tl.debug_barrier()  # the next words are computed from these
    word = word ^ (word >> 11)
    word = word ^ ((word << 7) & 0x9D2C5680)
    word = word ^ ((word << 15) & 0xEFC60000)
    return word ^ (word >> 18)


@triton.jit
def _find_swaps(WORDS, at, is_there, V):
    """The places that the shuffle swaps the places `at` with."""
    words = _turn(WORDS, at, is_there)
    return at + (words % tl.maximum(V - at, 1).to(tl.uint32)).to(tl.int32)


@triton.jit
def _raise_all(SCORES, CAME, OUT, bias, V, row_stride, TILE: tl.constexpr, PDL: tl.constexpr):
    """Add the bias to every score, and note that nothing has come to any place."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * TILE + tl.arange(0, TILE)
    let_next_start(PDL)
    wait_for_input(PDL)
    scores = tl.load(SCORES + row * row_stride + token, mask=token < V, other=0.0)
    tl.store(OUT + row * V + token, (scores.to(tl.float32) + bias).to(scores.dtype), mask=token < V)
    tl.store(CAME + row * V + token, tl.full((TILE,), -1, tl.int32), mask=token < V)


@triton.jit
def _shuffle(SEEDS, WORDS, CAME, V, num_first, LANES: tl.constexpr, RING: tl.constexpr, PDL: tl.constexpr):
    """Note which of the first places' contents came last to every place."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    WORDS += row * RING
    CAME += row * V
    let_next_start(PDL)
    wait_for_input(PDL)
    _seed(WORDS, tl.load(SEEDS + row))
    for first in range(0, num_first, 227):
        place = first + lane
        swap = _find_swaps(WORDS, place, lane < 227, V)
        is_moved = (lane < 227) & (place < num_first) & (swap != place)
        tl.atomic_max(CAME + swap, place, mask=is_moved, sem="relaxed")


@triton.jit
def _restore(SCORES, CAME, OUT, V, num_first, row_stride, CHAINS: tl.constexpr, PDL: tl.constexpr):
    """Write the scores back of tokens that end past the first places: followed back to where they began."""
    row = tl.program_id(0).to(tl.int64)
    at = num_first + tl.program_id(1) * CHAINS + tl.arange(0, CHAINS)
    is_there = at < V
    CAME += row * V
    let_next_start(PDL)
    wait_for_input(PDL)
    before = tl.load(CAME + at, mask=is_there, other=-1)
    while tl.max(before, 0) >= 0:
        is_moved = before >= 0
        at = tl.where(is_moved, before, at)
        before = tl.load(CAME + at, mask=is_moved, other=-1)
    tl.store(OUT + row * V + at, tl.load(SCORES + row * row_stride + at, mask=is_there), mask=is_there)


@triton.jit
def _are_first(
    SEEDS, TOKENS, WORDS, FOUND, V, num_first, LANES: tl.constexpr, RING: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Follow one token through its own seed's shuffle."""
    number = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    WORDS += number * RING
    let_next_start(PDL)
    wait_for_input(PDL)
    at = tl.load(TOKENS + number).to(tl.int32)  # where the token is; below zero once it is in its final place
    _seed(WORDS, tl.load(SEEDS + number))
    first = tl.zeros((), tl.int32)
    while (first < num_first) & (at >= 0):
        place = first + lane
        is_there = (lane < 227) & (place < num_first)
        swap = _find_swaps(WORDS, place, lane < 227, V)
        reached = tl.min(tl.where(is_there & ((place == at) | (swap == at)), place, V), 0)
        while reached < V:
            moved = tl.max(tl.where(place == reached, swap, -1), 0)
            at = tl.where((reached != at) | (moved == at), -1, moved)
            is_next = is_there & (place > reached) & ((place == at) | (swap == at))
            reached = tl.min(tl.where(is_next, place, V), 0)
        first += 227
    tl.store(FOUND + number, (at < 0).to(tl.int8))


def raise_green(scores: torch.Tensor, seeds: torch.Tensor, num_first: int, bias: float) -> torch.Tensor:
    """Scores (rows, vocab) with `bias` added for the first tokens of the permutation of each row's seed (rows,)."""
    scores = scores if scores.stride(1) == 1 else scores.contiguous()
    rows, vocab = scores.shape
    came = torch.empty(rows, vocab, dtype=torch.int32, device=scores.device)
    words = torch.empty(rows, RING, dtype=torch.int32, device=scores.device)
    out = torch.empty(rows, vocab, dtype=scores.dtype, device=scores.device)
    stride, options = scores.stride(0), launch_options()
    launch(
        _raise_all,
        (rows, triton.cdiv(vocab, TILE)),
        scores,
        came,
        out,
        float(bias),
        vocab,
        stride,
        TILE=TILE,
        num_warps=4,
        **options,
    )
    if num_first:
        launch(
            _shuffle,
            (rows,),
            seeds,
            words,
            came,
            vocab,
            num_first,
            LANES=LANES,
            RING=RING,
            num_warps=4,
            num_stages=1,
            **options,
        )
    launch(
        _restore,
        (rows, triton.cdiv(vocab - num_first, CHAINS)),
        scores,
        came,
        out,
        vocab,
        num_first,
        stride,
        CHAINS=CHAINS,
        num_warps=4,
        **options,
    )
    return out


def are_first(seeds: torch.Tensor, tokens: torch.Tensor, count: int, num_first: int) -> torch.Tensor:
    """Whether each token is among the first so many of its own seed's permutation of `count`: (seeds,) bool."""
    words = torch.empty(len(seeds), RING, dtype=torch.int32, device=seeds.device)
    found = torch.empty(len(seeds), dtype=torch.int8, device=seeds.device)
    launch(
        _are_first,
        (len(seeds),),
        seeds,
        tokens,
        words,
        found,
        count,
        num_first,
        LANES=LANES,
        RING=RING,
        num_warps=4,
        num_stages=1,
        **launch_options(),
    )
    return found.view(torch.bool)
