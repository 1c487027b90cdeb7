"""Green lists on the device that marks: torch's CPU permutation, computed there.

A list is the first part of `torch.randperm` on a CPU: MT19937's words, one after the other, choose the swaps of a
shuffle. The words of a seed come 227 at a time, as many as do not need each other. The reference is
`watermark.twister`. Nothing waits for the host.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import torch
import triton
import triton.language as tl

from unspool.kernels.gpu.arguments import count_parts, lay_in_rows
from unspool.kernels.gpu.launching import launch, launch_options, let_next_start, wait_for_input
from unspool.kernels.gpu.sampling.replays import KeptReplays

TILE: Final = 1_024  # scores per program
CHAINS: Final = 256  # places that are followed at once
STATE: Final = 1_024  # words of memory for a seed's state: 624, and those that are written while it is read
LANES: Final = 256  # 227 of them work


@triton.jit
def _seed(WORDS, seed):
    """The first 624 words of a seed's state."""
    word = seed.to(tl.uint32)
    tl.store(WORDS, word.to(tl.int32, bitcast=True))
    for number in range(1, 624):
        word = (word ^ (word >> 30)) * 1812433253 + number
        tl.store(WORDS + number, word.to(tl.int32, bitcast=True))
    tl.debug_barrier()


@triton.jit
def _twist(high, low, other):
    """New words of the state, before they are tempered."""
    high, low = high.to(tl.uint32, bitcast=True), low.to(tl.uint32, bitcast=True)
    both = (high & 0x80000000) | (low & 0x7FFFFFFF)
    word = other.to(tl.uint32, bitcast=True) ^ (both >> 1) ^ ((both & 1) * 0x9908B0DF)
    return word.to(tl.int32, bitcast=True)


@triton.jit
def _find_swaps(chunk, reciprocals, at, V):
    """The places that the shuffle swaps the places `at` with: each is so far on as a word's remainder by what is left.

    The quotient by a reciprocal that was rounded down is right or one too small.
    """
    word = chunk.to(tl.uint32, bitcast=True)
    word = word ^ (word >> 11)
    word = word ^ ((word << 7) & 0x9D2C5680)
    word = word ^ ((word << 15) & 0xEFC60000)
    word = word ^ (word >> 18)
    left = tl.maximum(V - at, 1).to(tl.uint32)
    rest = word - tl.umulhi(word, reciprocals.to(tl.uint32, bitcast=True)) * left
    return at + tl.where(rest >= left, rest - left, rest).to(tl.int32)


@triton.jit
def _shuffle(
    SEEDS, WORDS, RECIPROCALS, CAME, V, num_first, LANES: tl.constexpr, STATE: tl.constexpr, PDL: tl.constexpr
):
    """Note which of the first places' contents came last to every place.

    A program per row leaves the device nearly idle: its chunks take turns in memory, which keeps it waiting for less
    time than exchanges between threads do.
    """
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    CAME += row * V
    WORDS += row * STATE
    let_next_start(PDL)
    wait_for_input(PDL)
    _seed(WORDS, tl.load(SEEDS + row))
    for first in range(0, num_first, 227):
        place = first + lane
        is_there = (lane < 227) & (place < num_first)
        reciprocals = tl.load(RECIPROCALS + place, mask=is_there, other=0)
        high = tl.load(WORDS + (place & 1023), mask=lane < 227, other=0)
        low = tl.load(WORDS + ((place + 1) & 1023), mask=lane < 227, other=0)
        other = tl.load(WORDS + ((place + 397) & 1023), mask=lane < 227, other=0)
        chunk = _twist(high, low, other)
        tl.store(WORDS + ((place + 624) & 1023), chunk, mask=lane < 227)
        tl.debug_barrier()  # the next words are computed from these
        swap = _find_swaps(chunk, reciprocals, place, V)
        tl.atomic_max(CAME + swap, place, mask=is_there & (swap != place), sem="relaxed")


@triton.jit
def _leave_out(CAME, GREEN, V, num_first, CHAINS: tl.constexpr, PDL: tl.constexpr):
    """Take tokens off the lists that end past the first places: followed back to where they began."""
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
    tl.store(GREEN + row * V + at, tl.zeros((CHAINS,), tl.int8), mask=is_there)


@triton.jit
def _raise(SCORES, GREEN, OUT, bias, V, row_stride, TILE: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * TILE + tl.arange(0, TILE)
    let_next_start(PDL)
    wait_for_input(PDL)
    scores = tl.load(SCORES + row * row_stride + token, mask=token < V, other=0.0)
    is_green = tl.load(GREEN + row * V + token, mask=token < V, other=0) != 0
    raised = (scores.to(tl.float32) + bias).to(scores.dtype)
    tl.store(OUT + row * V + token, tl.where(is_green, raised, scores), mask=token < V)


MOST_KEPT_MARKS: Final = 1 << 21  # of all rows: more are not kept from call to call
_kept: Final = KeptReplays[tuple[torch.Tensor, ...]]()


def _make_work(rows: int, vocab: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Where each place's token came from (rows, vocab) int32 and whether tokens are green (rows, vocab) int8, both
    parts of the first; and the states of the seeds."""
    with torch.inference_mode(False):
        marks = torch.empty(5 * rows * vocab, dtype=torch.int8, device=device)
        state = torch.empty(rows, STATE, dtype=torch.int32, device=device)
    edge = 4 * rows * vocab
    return marks, marks[:edge].view(torch.int32).view(rows, vocab), marks[edge:].view(rows, vocab), state


def raise_green(scores: torch.Tensor, seeds: torch.Tensor, num_first: int, bias: float) -> torch.Tensor:
    """Scores (rows, vocab) with `bias` added for the first tokens of the permutation of each row's seed (rows,)."""
    scores = lay_in_rows(scores)
    (rows, vocab), device, options = scores.shape, scores.device, launch_options()
    marks, came, green, state = (
        _kept.lend((rows, vocab), device, lambda: _make_work(rows, vocab, device))
        if rows * vocab <= MOST_KEPT_MARKS
        else _make_work(rows, vocab, device)
    )
    marks.fill_(-1)  # nothing came from elsewhere, everything is green
    out = torch.empty(rows, vocab, dtype=scores.dtype, device=device)
    if num_first:
        launch(
            _shuffle,
            (rows,),
            seeds,
            state,
            list_reciprocals(vocab, num_first, device),
            came,
            vocab,
            num_first,
            LANES=LANES,
            STATE=STATE,
            num_warps=4,
            num_stages=1,
            **options,
        )
    grid = (rows, count_parts(vocab - num_first, CHAINS))
    launch(_leave_out, grid, came, green, vocab, num_first, CHAINS=CHAINS, num_warps=4, **options)
    grid, stride = (rows, count_parts(vocab, TILE)), scores.stride(0)
    launch(_raise, grid, scores, green, out, float(bias), vocab, stride, TILE=TILE, num_warps=4, **options)
    return out


@lru_cache(maxsize=16)
def list_reciprocals(count: int, num_first: int, device: torch.device) -> torch.Tensor:
    """2**32 over what is left of `count` at each of the first places, rounded down: (places,) int32, unsigned."""
    words = (1 << 32) // (count - torch.arange(max(1, num_first)))
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32).to(device)
