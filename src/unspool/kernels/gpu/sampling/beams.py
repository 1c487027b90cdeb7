"""A step of beam search in three kernels: every beam's likeliest tokens, each prompt's best candidates among them, and
which of those go on. `decoding.beams.selection` does the same operator by operator.

A row of scores is cut into tiles, one per program, of which each finds its highest few; then rows and prompts are
merged from those. Beam sampling adds noise to what is compared: that of `decoding.randomness.draw_gumbel`.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl

from unspool.kernels.gpu.arguments import count_parts, lay_in_rows, round_up
from unspool.kernels.gpu.launching import launch, launch_options, let_next_start, wait_for_input
from unspool.kernels.gpu.mixing import mix
from unspool.kernels.gpu.sampling.readings import join_parts

TILE: Final = 4_096  # scores per program of the first kernel
MOST_CANDIDATES: Final = 64  # of a prompt: each is found by one more search
MOST_RANKED: Final = 4_096  # candidates of all beams of a prompt


LOWEST: Final = tl.constexpr(-3.4028234663852886e38)  # stands for what is forbidden: it can be found, once


@triton.jit
def _rank(values, is_there):
    """Numbers as they are compared: NaN comes first, as in torch, and minus infinity is what nobody finds again."""
    values = tl.where(values == values, values, float("inf"))
    return tl.where(is_there, tl.where(values > LOWEST, values, LOWEST), float("-inf"))


@triton.jit
def _load_unclamped(top, at):
    """The number at an address that was found: NaN and infinity are found alike, and so is what is forbidden."""
    is_odd = (top == float("inf")) | (top == LOWEST)
    return tl.where(is_odd, tl.load(at, mask=is_odd, other=0.0), top)


@triton.jit
def _make_noise(seed, position, place):
    """Gumbel's, in float64 up to the last step, so that devices agree."""
    state = mix(seed.to(tl.uint64) + 0x9E3779B97F4A7C15)
    state = mix(state + position.to(tl.uint64) * 0x9E3779B97F4A7C15)
    bits = mix(state + place.to(tl.uint64) * 0x9E3779B97F4A7C15) >> 11
    uniform = (bits.to(tl.float64) + 0.5) * 1.1102230246251565e-16  # 2**-53
    return (-tl.log(-tl.log(uniform))).to(tl.float32)


@triton.jit(do_not_specialize=["RUNNING", "SEEDS", "POSITIONS", "seed_stride", "position_stride"])
def _rank_tiles(
    SCORES, RUNNING, SEEDS, POSITIONS, PARTS, TOPS, TOKENS, V, row_stride, seed_stride, position_stride,
    BEAMS: tl.constexpr, K: tl.constexpr, TILE: tl.constexpr, IS_NORMALISED: tl.constexpr, DRAWS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The highest scores of every tile, in descending order, and the tile's sum of exponentials; with `DRAWS` the
    highest of what scores, running beams and noise add up to."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, TILE)
    token = tile * TILE + at
    let_next_start(PDL)
    wait_for_input(PDL)
    scores = tl.load(SCORES + row * row_stride + token, mask=token < V, other=float("-inf"))
    if DRAWS:
        prompt = row // BEAMS
        seed, position = tl.load(SEEDS + prompt * seed_stride), tl.load(POSITIONS + prompt * position_stride)
        noise = _make_noise(seed, position, (row % BEAMS) * V + token)
        scores = (scores + tl.load(RUNNING + row)) + noise
    place = row * tl.num_programs(1) + tile
    if not IS_NORMALISED:
        known = tl.where(scores == scores, scores, float("inf"))
        highest = tl.max(known, 0)
        base = tl.where(highest > float("-inf"), highest, 0.0)
        tl.store(PARTS + place * 2, highest)
        tl.store(PARTS + place * 2 + 1, tl.sum(tl.exp(known - base), 0))
    scores = _rank(scores, token < V)
    for rank in range(K):
        top, found = tl.max(scores, 0, return_indices=True)
        is_found = top > float("-inf")  # the last tile may have fewer
        found = tl.where(is_found, found, 0)
        tl.store(TOPS + place * K + rank, _load_unclamped(top, SCORES + row * row_stride + tile * TILE + found))
        tl.store(TOKENS + place * K + rank, tl.where(is_found, tile * TILE + found, -1))
        scores = tl.where(at == found, float("-inf"), scores)


@triton.jit(do_not_specialize=["RUNNING"])
def _rank_rows(
    SCORES, PARTS, TOPS, TOKENS, RUNNING, VALUES, TOTALS, FOUND, num_tiles, row_stride,
    K: tl.constexpr, PLACES: tl.constexpr, TILES: tl.constexpr, IS_NORMALISED: tl.constexpr, DRAWS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A beam's likeliest tokens, in descending order, and the log-probabilities of the sequences that they make; with
    `DRAWS` also what they are compared by."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, PLACES)
    let_next_start(PDL)
    wait_for_input(PDL)
    total = 0.0
    if not IS_NORMALISED:
        _, total = join_parts(PARTS, row, num_tiles, TILES)
    running = tl.load(RUNNING + row)
    first = row * num_tiles * K
    is_there = at < num_tiles * K
    tops = tl.load(TOPS + first + at, mask=is_there, other=float("-inf"))
    tops = _rank(tops, is_there & (tl.load(TOKENS + first + at, mask=is_there, other=-1) >= 0))
    for rank in range(K):
        top, place = tl.max(tops, 0, return_indices=True)
        token = tl.load(TOKENS + first + place)
        if DRAWS:
            tl.store(VALUES + row * K + rank, _load_unclamped(top, TOPS + first + place))
            tl.store(TOTALS + row * K + rank, tl.load(SCORES + row * row_stride + token) + running)
        else:
            tl.store(VALUES + row * K + rank, (_load_unclamped(top, TOPS + first + place) - total) + running)
        tl.store(FOUND + row * K + rank, token)
        tops = tl.where(at == place, float("-inf"), tops)


@triton.jit
def _choose(
    VALUES, TOTALS, FOUND, ENDS, num_ends, never, PACKED, PARENTS, NEXT, RUNNING,
    BEAMS: tl.constexpr, K: tl.constexpr, PLACES: tl.constexpr, C: tl.constexpr, CP: tl.constexpr,
    DRAWS: tl.constexpr, BY_ORDER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A prompt's best candidates, and the beams that go on: the best that do not end, then those that do. With
    `BY_ORDER` whatever does not end comes first, if it is forbidden too."""
    prompt = tl.program_id(0).to(tl.int64)
    at, order = tl.arange(0, PLACES), tl.arange(0, CP)
    let_next_start(PDL)
    wait_for_input(PDL)
    first = prompt * BEAMS * K
    is_value = at < BEAMS * K
    values = _rank(tl.load(VALUES + first + at, mask=is_value, other=float("-inf")), is_value)
    best = tl.full((CP,), float("-inf"), tl.float32)
    parent, token = tl.zeros((CP,), tl.int32), tl.zeros((CP,), tl.int32)
    for rank in range(C):
        top, place = tl.max(values, 0, return_indices=True)
        is_this = order == rank
        if DRAWS:
            best = tl.where(is_this, tl.load(TOTALS + first + place), best)
        else:
            best = tl.where(is_this, _load_unclamped(top, VALUES + first + place), best)
        token = tl.where(is_this, tl.load(FOUND + first + place), token)
        parent = tl.where(is_this, place // K, parent)
        values = tl.where(at == place, float("-inf"), values)
    is_there = order < C
    packed = PACKED + prompt * 3 * C + order
    tl.store(packed, token, mask=is_there)
    tl.store(packed + C, parent, mask=is_there)
    tl.store(packed + 2 * C, best.to(tl.int32, bitcast=True), mask=is_there)
    is_end = tl.zeros((CP,), tl.int32)
    for number in range(num_ends):
        is_end += (token == tl.load(ENDS + number)).to(tl.int32)
    lowered = best.to(tl.float64)  # as the host counts: in float32 what is added to `never` would be lost
    lowered = tl.where(is_end > 0, lowered + never, lowered)
    key = tl.where(lowered == lowered, lowered, float("-inf"))
    if BY_ORDER:
        key = tl.where(is_end > 0, 0.0, 1.0).to(tl.float64)
    is_tie = key[None, :] == key[:, None]
    is_before = (key[None, :] > key[:, None]) | (is_tie & (order[None, :] < order[:, None]))
    rank = tl.sum(is_before.to(tl.int32), 1)
    is_kept = is_there & (rank < BEAMS)
    row = prompt * BEAMS + rank
    tl.store(PARENTS + row, prompt * BEAMS + parent, mask=is_kept)
    tl.store(NEXT + row, token.to(tl.int64), mask=is_kept)
    tl.store(RUNNING + row, lowered.to(tl.float32), mask=is_kept)


class _Ranking(NamedTuple):
    """Where the likeliest tokens of tiles and of rows are written."""

    parts: torch.Tensor  # of each tile its highest score and its sum of exponentials
    tops: torch.Tensor  # of each tile its highest scores,
    tokens: torch.Tensor  # and their tokens
    values: torch.Tensor  # of each row the highest log-probabilities,
    totals: torch.Tensor  # the same with what runs before,
    found: torch.Tensor  # and their tokens


def _launch_ranking(
    scores: torch.Tensor,  # (rows, vocab), rows that lie whole
    running: torch.Tensor,  # (rows,)
    into: _Ranking,
    count: int,
    num_beams: int,
    drawing: tuple[torch.Tensor, torch.Tensor],  # seeds and positions, read if it draws
    is_normalised: bool,
    draws: bool,
) -> None:
    """Rank the `count` likeliest tokens of every tile, and then of every row."""
    rows, tiles, options = len(scores), count_parts(scores.shape[1], TILE), launch_options()
    seeds, positions = drawing
    launch(
        _rank_tiles,
        (rows, tiles),
        scores,
        running,
        seeds,
        positions,
        into.parts,
        into.tops,
        into.tokens,
        scores.shape[1],
        scores.stride(0),
        seeds.stride(0),
        positions.stride(0),
        BEAMS=num_beams,
        K=count,
        TILE=TILE,
        IS_NORMALISED=is_normalised,
        DRAWS=draws,
        num_warps=8,
        **options,
    )
    launch(
        _rank_rows,
        (rows,),
        scores,
        into.parts,
        into.tops,
        into.tokens,
        running,
        into.values,
        into.totals,
        into.found,
        tiles,
        scores.stride(0),
        K=count,
        PLACES=max(2, round_up(tiles * count)),
        TILES=max(2, round_up(tiles)),
        IS_NORMALISED=is_normalised,
        DRAWS=draws,
        **options,
    )


def choose_beams(
    scores: torch.Tensor,  # (rows, vocab) float32: logits, or log-probabilities if they are normalised
    running: torch.Tensor,  # (rows,) float32
    ends: torch.Tensor,  # (any,) int64: tokens that end a sequence
    *,
    num_beams: int,
    num_candidates: int,
    never: float,
    is_normalised: bool,
    drawing: tuple[torch.Tensor, torch.Tensor] | None = None,  # (prompts,) int64 each: seeds, positions
    by_order: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The candidates of a step, and which of them go on; a sequence that ends is lowered by `never`. With `drawing`
    candidates are drawn from log-probabilities instead of taken by them. With `by_order` no candidate that ends goes on
    before one that does not, however low.

    Returns (prompts, 3, candidates) int32: tokens, the beams that they continue, the bits of their log-probabilities;
    and of every row that goes on the row that it comes from, its next token (int64 both), and its log-probability.
    """
    scores = lay_in_rows(scores)
    rows, vocab = scores.shape
    prompts, few = rows // num_beams, min(num_candidates, vocab)
    tiles = count_parts(vocab, TILE)
    device = scores.device
    assert is_normalised or drawing is None
    draws = drawing is not None
    seeds, positions = drawing if drawing is not None else (ends, ends)
    floats = torch.empty(rows * (tiles * (few + 2) + few * 2), dtype=torch.float32, device=device)
    numbers = torch.empty(rows * (tiles + 1) * few, dtype=torch.int32, device=device)
    parts, tops, values, totals = floats.split([rows * tiles * 2, rows * tiles * few, rows * few, rows * few])
    tokens, found = numbers.split([rows * tiles * few, rows * few])
    packed = torch.empty(prompts, 3, num_candidates, dtype=torch.int32, device=device)
    moves = torch.empty(2, rows, dtype=torch.int64, device=device)
    after = torch.empty(rows, dtype=torch.float32, device=device)
    ranked = _Ranking(parts, tops, tokens, values, totals, found)
    _launch_ranking(scores, running, ranked, few, num_beams, (seeds, positions), is_normalised, draws)
    options = launch_options()
    launch(
        _choose,
        (prompts,),
        values,
        totals,
        found,
        ends,
        ends.numel(),
        never,
        packed,
        moves[0],
        moves[1],
        after,
        BEAMS=num_beams,
        K=few,
        PLACES=max(2, round_up(num_beams * few)),
        C=num_candidates,
        CP=max(2, round_up(num_candidates)),
        DRAWS=draws,
        BY_ORDER=by_order,
        **options,
    )
    return packed, moves[0], moves[1], after


def rank_logprobs(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The log-probabilities (rows, count) of the likeliest tokens under logits (rows, vocab) float32, falling, and
    those tokens, int32."""
    logits = lay_in_rows(logits)
    rows, vocab = logits.shape
    tiles, device = count_parts(vocab, TILE), logits.device
    floats = torch.empty(rows * (tiles * (count + 2)), dtype=torch.float32, device=device)
    parts, tops = floats[: rows * tiles * 2], floats[rows * tiles * 2 :]
    tokens = torch.empty(rows * tiles * count, dtype=torch.int32, device=device)
    values = torch.empty(rows, count, dtype=torch.float32, device=device)
    found = torch.empty(rows, count, dtype=torch.int32, device=device)
    nothing = torch.zeros(rows, dtype=torch.float32, device=device)  # no beam runs before
    ranked = _Ranking(parts, tops, tokens, values, values, found)
    _launch_ranking(logits, nothing, ranked, count, 1, (tokens, tokens), is_normalised=False, draws=False)
    return values, found
