"""SynthID-Text's tournament, some rounds at a time.

What a round multiplies a token's probability by depends on the token's bit and the mass of those with a one. So the
factors of `ROUNDS` rounds follow from the masses of the bits' 2 ** ROUNDS patterns: thirty rounds are three passes over
the vocabulary instead of thirty. A pattern's mass is the sum over a list of places that never changes, so no two
programs add to one number; sums are of integers, whose order does not matter: a result is the same in every run. The
reference is `watermark.tournament.run_plainly`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl

from unspool.kernels.gpu.arguments import count_parts, lay_in_rows, round_up
from unspool.kernels.gpu.launching import launch, launch_options, let_next_start, wait_for_input

TILE: Final = 1_024  # tokens per program
ROUNDS: Final = 10  # of a group
SUMS: Final = 8  # patterns per program
WIDTH: Final = 128  # places of each that are read at once: a table of 2**16 has 64 of a pattern on average
FACTOR_WARPS: Final = 4
LOWEST: Final = -103.9  # below it a float32's exponential is zero


@triton.jit
def _weigh_tiles(SCORES, TOPS, WEIGHTS, V, row_stride, TILE: tl.constexpr, PDL: tl.constexpr):
    """Every tile's highest score (infinity if one is NaN), and the sum of exponentials relative to it."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = tile * TILE + tl.arange(0, TILE)
    let_next_start(PDL)
    wait_for_input(PDL)
    scores = tl.load(SCORES + row * row_stride + token, mask=token < V, other=float("-inf")).to(tl.float32)
    scores = tl.where(scores == scores, scores, float("inf"))
    top = tl.max(scores, 0)
    shares = tl.where(scores > float("-inf"), tl.exp(scores - top), 0.0)
    tl.store(TOPS + row * tl.num_programs(1) + tile, top)
    tl.store(WEIGHTS + row * tl.num_programs(1) + tile, tl.sum(shares, 0))


@triton.jit
def _read_row(TOPS, WEIGHTS, row, num_tiles, TILES: tl.constexpr):
    """A row's highest score and the sum of exponentials relative to it."""
    tile = tl.arange(0, TILES)
    tops = tl.load(TOPS + row * num_tiles + tile, mask=tile < num_tiles, other=float("-inf"))
    weights = tl.load(WEIGHTS + row * num_tiles + tile, mask=tile < num_tiles, other=0.0)
    highest = tl.max(tops, 0)
    return highest, tl.sum(tl.where(tops > float("-inf"), weights * tl.exp(tops - highest), 0.0), 0)


@triton.jit
def _find_base(CONTEXTS, row, size):
    """Where the first token's bits are in the table; the low half of a hash is all that counts."""
    hashed = tl.load(CONTEXTS + row).to(tl.uint32) * 0x4C957F2D + 1
    return (hashed * 0x4C957F2D).to(tl.int32, bitcast=True) & (size - 1)


@triton.jit
def _share_out(
    SCORES, TOPS, WEIGHTS, CONTEXTS, WORDS, SHARES, BITS, V, row_stride, num_tiles, num_classes, step, size,
    NUM_WORDS: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The probability and the bits of every class: tokens that lie a table's size apart have the same bits."""
    row = tl.program_id(0).to(tl.int64)
    one = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_there = one < num_classes
    let_next_start(PDL)
    wait_for_input(PDL)
    at = (_find_base(CONTEXTS, row, size) + one * step) & (size - 1)
    for number in tl.static_range(NUM_WORDS):
        word = tl.load(WORDS + number * size + at, mask=is_there, other=0)
        tl.store(BITS + (row * NUM_WORDS + number) * num_classes + one, word, mask=is_there)
    highest, total = _read_row(TOPS, WEIGHTS, row, num_tiles, TILES)
    share = tl.zeros((TILE,), tl.float32)
    for first in range(0, V, size):
        token = first + one
        scores = tl.load(SCORES + row * row_stride + token, mask=is_there & (token < V), other=float("-inf"))
        share += tl.exp(scores.to(tl.float32) - highest)
    tl.store(SHARES + row * num_classes + one, share / total, mask=is_there)


@triton.jit(do_not_specialize=["num_rows"])
def _sum_up(
    SHARES, CONTEXTS, ORDER, ENDS, SORTED, FACTORS, MASSES, num_classes, num_words, size, inverse, num_rows,
    GROUP: tl.constexpr, BINS: tl.constexpr, SUMS: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The masses of some patterns of a group of rounds, after the groups before it."""
    row = tl.program_id(0).to(tl.int64)
    pattern = tl.program_id(1) * SUMS + tl.arange(0, SUMS)
    let_next_start(PDL)
    begin = tl.load(ENDS + GROUP * (BINS + 1) + pattern)
    end = tl.load(ENDS + GROUP * (BINS + 1) + pattern + 1)
    wait_for_input(PDL)
    base = _find_base(CONTEXTS, row, size)
    sums = tl.zeros((SUMS,), tl.int64)
    for first in range(0, tl.max(end - begin, 0), WIDTH):
        at = begin[:, None] + first + tl.arange(0, WIDTH)[None, :]
        is_there = at < end[:, None]
        place = tl.load(ORDER + GROUP * size + at, mask=is_there, other=0)
        one = ((place - base) * inverse) & (size - 1)
        is_there = is_there & (one < num_classes)
        share = tl.load(SHARES + row * num_classes + one, mask=is_there, other=0.0)
        for before in tl.static_range(GROUP):
            word = tl.load(SORTED + (GROUP * num_words + before // 3) * size + at, mask=is_there, other=0)
            factor = (before * num_rows + row) * BINS + ((word >> (before % 3 * 10)) & (BINS - 1))
            share *= tl.load(FACTORS + factor, mask=is_there, other=0.0)
        mass = tl.where(share == share, share * 1152921504606846976.0, 0.0).to(tl.int64)  # in 2**-60
        sums += tl.sum(mass, 1)
    tl.store(MASSES + (GROUP * num_rows + row) * BINS + pattern, sums)


@triton.jit(do_not_specialize=["group", "num_rows"])
def _find_factors(
    MASSES, FACTORS, LOGS, group, num_rows,
    ROUNDS: tl.constexpr, BINS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """What the rounds of a group multiply the probability of each pattern by, and its logarithm."""
    at = (group * num_rows + tl.program_id(0).to(tl.int64)) * BINS + tl.arange(0, BINS)
    let_next_start(PDL)
    wait_for_input(PDL)
    masses = tl.load(MASSES + at).to(tl.float64) * 8.673617379884035e-19  # 2**-60
    factors = tl.full((BINS,), 1.0, tl.float64)
    for number in tl.static_range(ROUNDS):
        bit = ((tl.arange(0, BINS) >> number) & 1).to(tl.float64)
        factor = 1.0 + bit - tl.sum(masses * bit, 0)
        masses *= factor
        factors *= factor
    factors = factors.to(tl.float32)
    tl.store(FACTORS + at, factors)
    tl.store(LOGS + at, tl.where(factors > 0.0, tl.log(factors), float("-inf")))


@triton.jit(do_not_specialize=["num_rows"])
def _write_logs(
    SCORES, TOPS, WEIGHTS, BITS, LOGS, REPEATED, OUT, V, row_stride, num_tiles, num_classes, size, num_rows, lowest,
    NUM_WORDS: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, BINS: tl.constexpr, GROUPS: tl.constexpr,
    LEAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    one = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_class = one < num_classes
    let_next_start(PDL)
    wait_for_input(PDL)
    highest, total = _read_row(TOPS, WEIGHTS, row, num_tiles, TILES)
    is_kept = (tl.load(REPEATED + row) != 0) | (highest == float("inf")) | (highest == float("-inf"))
    for first in range(0, V, size):
        token = first + one
        is_there = is_class & (token < V)
        given = tl.load(SCORES + row * row_stride + token, mask=is_there, other=float("-inf"))
        below = given.to(tl.float32) - highest
        logs = below - tl.log(total)
        for group in tl.static_range(GROUPS):
            word = tl.load(BITS + (row * NUM_WORDS + group // 3) * num_classes + one, mask=is_class, other=0)
            pattern = (word >> (group % 3 * 10)) & (BINS - 1)
            logs += tl.load(LOGS + (group * num_rows + row) * BINS + pattern, mask=is_class, other=0.0)
        logs = tl.where((below > LEAST) & (logs > lowest), logs, lowest)
        marked = tl.where(is_kept | (given == float("-inf")), given, logs.to(given.dtype))
        tl.store(OUT + row * V + token, marked, mask=is_there)


@dataclass(frozen=True, slots=True)
class SortedBits:
    """A table's bits, and its places in the order of every group's patterns: a pattern's mass is the sum of a stretch.

    The place of a class moves with the context, by `step` from class to class; a pattern's places stay.
    """

    words: torch.Tensor  # (words, size) int32: the bits of 30 rounds each
    depth: int  # rounds
    step: int
    order: torch.Tensor  # (groups, size) int32: places
    ends: torch.Tensor  # (groups, patterns + 1) int32: where each pattern's begin, and the last one's end
    sorted: torch.Tensor  # (groups, words, size) int32: the words in that order

    @classmethod
    def of(cls, words: torch.Tensor, depth: int, step: int) -> SortedBits:
        """Sort a table's bits."""
        order, ends, listed = [], [], []
        for group in range(count_parts(depth, ROUNDS)):
            patterns = (words[group // 3] >> (group % 3 * ROUNDS)) & ((1 << ROUNDS) - 1)
            places = patterns.argsort(stable=True)
            counts = torch.bincount(patterns, minlength=1 << ROUNDS)
            order.append(places.to(torch.int32))
            ends.append(torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32))
            listed.append(words[:, places])
        return cls(words, depth, step, torch.stack(order), torch.stack(ends), torch.stack(listed))


def mark_scores(scores: torch.Tensor, contexts: torch.Tensor, repeated: torch.Tensor, bits: SortedBits) -> torch.Tensor:
    """The winner's log-probabilities (rows, vocab), after contexts of these hashes (rows,) int64.

    Rows that are repeated, and those without a finite highest score, stay as they are.
    """
    scores = lay_in_rows(scores)
    rows, vocab = scores.shape
    num_words, size = bits.words.shape
    device, groups, num_classes = scores.device, len(bits.order), min(vocab, size)
    bins, num_tiles = 1 << ROUNDS, count_parts(vocab, TILE)
    tops, weights = torch.empty(2, rows, num_tiles, dtype=torch.float32, device=device)
    shares = torch.empty(rows, num_classes, dtype=torch.float32, device=device)
    words = torch.empty(rows, num_words, num_classes, dtype=torch.int32, device=device)
    masses = torch.empty(groups, rows, bins, dtype=torch.int64, device=device)
    factors, logs = torch.empty(2, groups, rows, bins, dtype=torch.float32, device=device)
    out = torch.empty(rows, vocab, dtype=scores.dtype, device=device)
    stride, options = scores.stride(0), launch_options()
    tiles, grid = max(2, round_up(num_tiles)), (rows, count_parts(num_classes, TILE))
    launch(_weigh_tiles, (rows, num_tiles), scores, tops, weights, vocab, stride, TILE=TILE, num_warps=4, **options)
    launch(
        _share_out,
        grid,
        scores,
        tops,
        weights,
        contexts,
        bits.words,
        shares,
        words,
        vocab,
        stride,
        num_tiles,
        num_classes,
        bits.step,
        size,
        NUM_WORDS=num_words,
        TILE=TILE,
        TILES=tiles,
        num_warps=4,
        **options,
    )
    for group in range(groups):
        launch(
            _sum_up,
            (rows, bins // SUMS),
            shares,
            contexts,
            bits.order,
            bits.ends,
            bits.sorted,
            factors,
            masses,
            num_classes,
            num_words,
            size,
            pow(bits.step, -1, size),
            rows,
            GROUP=group,
            BINS=bins,
            SUMS=SUMS,
            WIDTH=WIDTH,
            num_warps=4,
            **options,
        )
        launch(
            _find_factors,
            (rows,),
            masses,
            factors,
            logs,
            group,
            rows,
            ROUNDS=min(ROUNDS, bits.depth - group * ROUNDS),
            BINS=bins,
            num_warps=FACTOR_WARPS,
            **options,
        )
    launch(
        _write_logs,
        grid,
        scores,
        tops,
        weights,
        words,
        logs,
        repeated,
        out,
        vocab,
        stride,
        num_tiles,
        num_classes,
        size,
        rows,
        torch.finfo(scores.dtype).min,
        NUM_WORDS=num_words,
        TILE=TILE,
        TILES=tiles,
        BINS=bins,
        GROUPS=groups,
        LEAST=LOWEST,
        num_warps=4,
        **options,
    )
    return out
