"""Following single tokens through the shuffles of seeds, one warp for each.

A token is on a seed's list if the shuffle takes it to one of the first places. So the words of MT19937 are made, 224
at a time (as many as do not need each other, in whole warps), and each is asked one thing: does its swap go where the
token is? It does if the word, less the way to there, is divisible by what is left of the vocabulary. A product with a
number from a table and a comparison leave out nearly all words; where one is left, or the token's own place is swapped,
the whole chunk is looked at exactly. The words lie in the program's own shared memory. The reference is
`watermark.twister.are_first`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import numpy as np
import torch
import triton
import triton.language as tl

STATE: Final = 624  # words that the next ones are made of
SLOTS: Final = 7  # words of a thread in a chunk
CHUNK: Final = 32 * SLOTS
CHUNKS: Final = 8  # that are written before the state moves back to the beginning
WORDS: Final = STATE + CHUNK * CHUNKS + 32  # of memory
RESERVE: Final = f"{{ .shared .align 16 .b8 words_of_seed[{4 * WORDS}]; mov.u32 $0, words_of_seed; }}"
HIGH_BITS: Final = 8  # from so many powers of two in a divisor on, they alone are looked at


@triton.jit
def _write(ROOM, at, word, IS_SHARED: tl.constexpr):
    if IS_SHARED:
        tl.inline_asm_elementwise(
            "{ st.shared.b32 [$1], $2; mov.b32 $0, 0; }", "=r,r,r", [at, word], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        tl.store(ROOM + at, word.to(tl.int32, bitcast=True))


@triton.jit
def _read(ROOM, at, IS_SHARED: tl.constexpr):
    if IS_SHARED:
        word = tl.inline_asm_elementwise(
            "ld.shared.b32 $0, [$1];", "=r,r", [at], dtype=tl.uint32, is_pure=False, pack=1
        )
    else:
        word = tl.load(ROOM + at).to(tl.uint32, bitcast=True)
    return word


@triton.jit
def _read_slots(ROOM, at, STEP: tl.constexpr, COUNT: tl.constexpr, IS_SHARED: tl.constexpr):
    """The words of the slots from `at` on, before anything is written that might have to wait for them."""
    words = ()
    for slot in tl.static_range(COUNT):
        words += (_read(ROOM, at + 32 * slot * STEP, IS_SHARED),)
    return words


@triton.jit
def _meet(IS_SHARED: tl.constexpr):
    """What the warp's threads wrote is there for all of them."""
    if IS_SHARED:
        tl.inline_asm_elementwise(
            "{ bar.warp.sync 0xffffffff; mov.b32 $0, 0; }", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        tl.debug_barrier()


@triton.jit
def _temper(word):
    word = word ^ (word >> 11)
    word = word ^ ((word << 7) & 0x9D2C5680)
    word = word ^ ((word << 15) & 0xEFC60000)
    return word ^ (word >> 18)


@triton.jit
def _follow(
    ROOM, base, first, at, V, num_first, CHUNK: tl.constexpr, STEP: tl.constexpr, IS_SHARED: tl.constexpr
):  # fmt: skip
    """Where a chunk of swaps takes a token; -1 if to one of the first places."""
    lane = tl.arange(0, 256)
    place = first + lane
    is_there = (lane < CHUNK) & (place < num_first)
    word = _temper(_read(ROOM, base + tl.where(lane < CHUNK, lane, 0) * STEP, IS_SHARED))
    swap = place + (word % tl.maximum(V - place, 1).to(tl.uint32)).to(tl.int32)
    reached = tl.min(tl.where(is_there & ((place == at) | (swap == at)), place, V), 0)
    while reached < V:
        moved = tl.max(tl.where(place == reached, swap, -1), 0)
        at = tl.where((reached != at) | (moved == at), -1, moved)
        is_next = is_there & (place > reached) & ((place == at) | (swap == at))
        reached = tl.min(tl.where(is_next, place, V), 0)
    return at


@triton.jit
def is_first(
    ROOM, DIVISORS, seed, at, V, num_first,
    STATE: tl.constexpr, SLOTS: tl.constexpr, CHUNKS: tl.constexpr, RESERVE: tl.constexpr, IS_SHARED: tl.constexpr,
):  # fmt: skip
    """Whether a seed's shuffle takes a token, at its own place at first, to one of the first places."""
    CHUNK: tl.constexpr = 32 * SLOTS
    STEP: tl.constexpr = 4 if IS_SHARED else 1  # from word to word, in bytes or words
    lane = tl.arange(0, 32)
    here = 0
    if IS_SHARED:
        here = tl.inline_asm_elementwise(RESERVE, "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    word = seed.to(tl.uint32)
    for number in range(0, STATE, 16):
        for step in tl.static_range(16):
            _write(ROOM, here + (number + step) * STEP, word, IS_SHARED)
            word = (word ^ (word >> 30)) * 1812433253 + (number + step + 1)
    first, base = 0, here
    while (first < num_first) & (at >= 0):  # below zero once it is in its final place
        _meet(IS_SHARED)
        places = base + lane * STEP
        DIVISOR = DIVISORS + first + lane
        left = (first - at + lane).to(tl.uint32, bitcast=True)
        high = _read_slots(ROOM, places, STEP, SLOTS, IS_SHARED)
        low = _read_slots(ROOM, places + STEP, STEP, SLOTS, IS_SHARED)
        other = _read_slots(ROOM, places + 397 * STEP, STEP, SLOTS, IS_SHARED)
        hits = tl.zeros((32,), tl.int1)
        for slot in tl.static_range(SLOTS):
            both = (high[slot] & 0x80000000) | (low[slot] & 0x7FFFFFFF)
            made = other[slot] ^ (both >> 1) ^ ((low[slot] & 1) * 0x9908B0DF)
            _write(ROOM, places + (STATE + 32 * slot) * STEP, made, IS_SHARED)
            divisor = tl.load(DIVISOR + 32 * slot)
            rest = _temper(made) + (left + 32 * slot)
            hits |= rest * divisor.to(tl.uint32) <= (divisor >> 32).to(tl.uint32)
        is_turn = (at >= first) & (at < first + CHUNK)
        _meet(IS_SHARED)
        if (tl.max(hits.to(tl.int32), 0) > 0) | is_turn:
            at = _follow(ROOM, base + STATE * STEP, first, at, V, num_first, CHUNK, STEP, IS_SHARED)
        first += CHUNK
        base += CHUNK * STEP
        if base == here + CHUNKS * CHUNK * STEP:  # the state moves back
            state = _read_slots(ROOM, base + lane * STEP, STEP, STATE // 32 + 1, IS_SHARED)
            for slot in tl.static_range(STATE // 32 + 1):
                _write(ROOM, here + (32 * slot + lane) * STEP, state[slot], IS_SHARED)
            base = here
    return at < 0


@lru_cache(maxsize=16)
def list_divisors(count: int, num_first: int, device: torch.device) -> torch.Tensor:
    """What shows of most words that they are not divisible by count - place, for places in whole chunks: int64.

    The low half is multiplied with a word; if that is divisible, the product is no larger than the high half. Either
    the low half is the inverse of the divisor's odd part, which makes multiples small; or, if the divisor has many
    powers of two, these are the better sign: the product is moved up until only bits are left that have to be zeros.
    """
    places = np.arange(triton.cdiv(num_first, CHUNK) * CHUNK, dtype=np.int64)
    divisors = np.maximum(count - places, 1)
    powers = divisors & -divisors
    odd = divisors // powers
    inverses = odd.copy()  # right in the lowest 3 bits; each round doubles them
    for _ in range(4):
        inverses = inverses * (2 - odd * inverses) & 0xFFFFFFFF
    is_high = powers >= 1 << HIGH_BITS
    limits = np.where(is_high, 0, 0xFFFFFFFF // odd)
    factors = np.where(is_high, inverses * ((1 << 32) // powers) & 0xFFFFFFFF, inverses)
    limits[num_first:], factors[num_first:] = 0, 1
    return torch.from_numpy((limits.astype(np.uint64) << np.uint64(32) | factors.astype(np.uint64)).view(np.int64)).to(
        device
    )
