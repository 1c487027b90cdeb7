"""SynthID-Text's tournament, some rounds at a time.

What a round multiplies a token's probability by depends on the token's bit and the mass of those with a one. So the
factors of `ROUNDS` rounds follow from the masses of the bits' 2 ** ROUNDS patterns: thirty rounds are three passes over
the vocabulary instead of thirty. Masses are summed as integers, whose order does not matter: a result is the same in
every run. The reference is `watermark.tournament.run_plainly`.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from unspool.kernels.gpu.launching import launch, launch_options, let_next_start, wait_for_input

TILE: Final = 1_024  # tokens per program
ROUNDS: Final = 10  # of a group
COPIES: Final = 4  # of the masses
FACTOR_WARPS: Final = 1
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
def _look_up(CONTEXTS, WORDS, BITS, num_classes, step, size, TILE: tl.constexpr, PDL: tl.constexpr):
    """The bits of every class after a row's context: neighbours lie `step` apart in the table."""
    row, word = tl.program_id(0).to(tl.int64), tl.program_id(2)
    one = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_there = one < num_classes
    let_next_start(PDL)
    wait_for_input(PDL)
    hashed = tl.load(CONTEXTS + row).to(tl.uint32) * 0x4C957F2D + 1  # the low half of a hash is all that counts
    at = ((hashed * 0x4C957F2D).to(tl.int32, bitcast=True) + one * step) & (size - 1)
    bits = tl.load(WORDS + word * size + at, mask=is_there, other=0)
    tl.store(BITS + (row * tl.num_programs(2) + word) * num_classes + one, bits, mask=is_there)


@triton.jit
def _read_pattern(BITS, row, one, is_there, num_classes, num_words, group, BINS: tl.constexpr):
    """The bits of a group's ten rounds; a word has three groups."""
    words = tl.load(BITS + (row * num_words + group // 3) * num_classes + one, mask=is_there, other=0)
    return (words >> (group % 3 * 10)) & (BINS - 1)


@triton.jit(do_not_specialize=["group", "num_rows"])
def _spread(
    SCORES, TOPS, WEIGHTS, BITS, FACTORS, CLASSES, MASSES, V, row_stride, num_tiles, num_classes, num_words, size,
    group, num_rows,
    TILE: tl.constexpr, TILES: tl.constexpr, BINS: tl.constexpr, COPIES: tl.constexpr, IS_FIRST: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Add the probabilities to the masses of their patterns in this group of rounds, after the group before it.

    Tokens that lie a table's size apart have the same bits: they are one class. Sums in several copies keep programs
    from waiting for each other.
    """
    row = tl.program_id(0).to(tl.int64)
    one = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_there = one < num_classes
    let_next_start(PDL)
    wait_for_input(PDL)
    if IS_FIRST:
        highest, total = _read_row(TOPS, WEIGHTS, row, num_tiles, TILES)
        share = tl.zeros((TILE,), tl.float32)
        for first in range(0, V, size):
            token = first + one
            scores = tl.load(SCORES + row * row_stride + token, mask=is_there & (token < V), other=float("-inf"))
            share += tl.exp(scores.to(tl.float32) - highest)
        share = share / total
    else:
        share = tl.load(CLASSES + row * num_classes + one, mask=is_there, other=0.0)
        before = _read_pattern(BITS, row, one, is_there, num_classes, num_words, group - 1, BINS)
        share *= tl.load(FACTORS + ((group - 1) * num_rows + row) * BINS + before, mask=is_there, other=0.0)
    tl.store(CLASSES + row * num_classes + one, share, mask=is_there)
    pattern = _read_pattern(BITS, row, one, is_there, num_classes, num_words, group, BINS)
    mass = tl.where(share == share, share * 1152921504606846976.0, 0.0).to(tl.int64)  # in 2**-60
    copy = (group * num_rows + row) * COPIES + tl.program_id(1) % COPIES
    tl.atomic_add(MASSES + copy * BINS + pattern, mass, mask=is_there & (mass > 0), sem="relaxed")


@triton.jit(do_not_specialize=["group", "num_rows"])
def _find_factors(
    MASSES, FACTORS, LOGS, group, num_rows,
    ROUNDS: tl.constexpr, BINS: tl.constexpr, COPIES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """What the rounds of a group multiply the probability of each pattern by, and its logarithm."""
    row = group * num_rows + tl.program_id(0).to(tl.int64)
    at = row * BINS + tl.arange(0, BINS)
    let_next_start(PDL)
    wait_for_input(PDL)
    sums = tl.zeros((BINS,), tl.int64)
    for copy in tl.static_range(COPIES):
        sums += tl.load(MASSES + (row * COPIES + copy) * BINS + tl.arange(0, BINS))
    masses = sums.to(tl.float64) * 8.673617379884035e-19  # 2**-60
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
    SCORES, TOPS, WEIGHTS, BITS, LOGS, REPEATED, OUT, V, row_stride, num_tiles, num_classes, num_words, size, num_rows,
    lowest,
    TILE: tl.constexpr, TILES: tl.constexpr, BINS: tl.constexpr, GROUPS: tl.constexpr, LEAST: tl.constexpr,
    PDL: tl.constexpr,
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
            pattern = _read_pattern(BITS, row, one, is_class, num_classes, num_words, group, BINS)
            logs += tl.load(LOGS + (group * num_rows + row) * BINS + pattern, mask=is_class, other=0.0)
        logs = tl.where((below > LEAST) & (logs > lowest), logs, lowest)
        marked = tl.where(is_kept | (given == float("-inf")), given, logs.to(given.dtype))
        tl.store(OUT + row * V + token, marked, mask=is_there)


def look_up_bits(contexts: torch.Tensor, words: torch.Tensor, vocab: int, step: int) -> torch.Tensor:
    """The bits of all tokens after contexts of these hashes (rows,) int64: (rows, words, classes) int32.

    `words` (words, size) int32 have the bits of 30 rounds each; a token's lie `step` after those of the token before.
    Tokens a table's size apart share a class.
    """
    num_words, size = words.shape
    num_classes = min(vocab, size)
    bits = torch.empty(len(contexts), num_words, num_classes, dtype=torch.int32, device=contexts.device)
    grid = (len(contexts), triton.cdiv(num_classes, TILE), num_words)
    launch(_look_up, grid, contexts, words, bits, num_classes, step, size, TILE=TILE, num_warps=4, **launch_options())
    return bits


def mark_scores(
    scores: torch.Tensor, bits: torch.Tensor, repeated: torch.Tensor, depth: int, size: int
) -> torch.Tensor:
    """The winner's log-probabilities (rows, vocab) by the `bits` (rows, words, classes) of a table of `size`.

    Rows that are repeated, and those without a finite highest score, stay as they are.
    """
    scores = scores if scores.stride(1) == 1 else scores.contiguous()
    rows, vocab = scores.shape
    device, groups = scores.device, triton.cdiv(depth, ROUNDS)
    bins, num_tiles, (num_words, num_classes) = 1 << ROUNDS, triton.cdiv(vocab, TILE), bits.shape[1:]
    tops, weights = torch.empty(2, rows, num_tiles, dtype=torch.float32, device=device)
    classes = torch.empty(rows, num_classes, dtype=torch.float32, device=device)
    masses = torch.zeros(groups, rows, COPIES, bins, dtype=torch.int64, device=device)
    factors, logs = torch.empty(2, groups, rows, bins, dtype=torch.float32, device=device)
    out = torch.empty(rows, vocab, dtype=scores.dtype, device=device)
    stride, options = scores.stride(0), launch_options()
    tiles, grid = max(2, triton.next_power_of_2(num_tiles)), (rows, triton.cdiv(num_classes, TILE))
    launch(_weigh_tiles, (rows, num_tiles), scores, tops, weights, vocab, stride, TILE=TILE, num_warps=4, **options)
    for group in range(groups):
        launch(
            _spread,
            grid,
            scores,
            tops,
            weights,
            bits,
            factors,
            classes,
            masses,
            vocab,
            stride,
            num_tiles,
            num_classes,
            num_words,
            size,
            group,
            rows,
            TILE=TILE,
            TILES=tiles,
            BINS=bins,
            COPIES=COPIES,
            IS_FIRST=group == 0,
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
            ROUNDS=min(ROUNDS, depth - group * ROUNDS),
            BINS=bins,
            COPIES=COPIES,
            num_warps=FACTOR_WARPS,
            **options,
        )
    launch(
        _write_logs,
        grid,
        scores,
        tops,
        weights,
        bits,
        logs,
        repeated,
        out,
        vocab,
        stride,
        num_tiles,
        num_classes,
        num_words,
        size,
        rows,
        torch.finfo(scores.dtype).min,
        TILE=TILE,
        TILES=tiles,
        BINS=bins,
        GROUPS=groups,
        LEAST=LOWEST,
        num_warps=4,
        **options,
    )
    return out
