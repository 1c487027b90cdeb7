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
from unspool.kernels.gpu.sampling.replays import KeptReplays

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


@triton.jit(do_not_specialize=["RUNNING", "SEEDS", "POSITIONS", "MASK", "seed_stride", "position_stride"])
def _rank_tiles(
    SCORES, RUNNING, SEEDS, POSITIONS, MASK, PARTS, TOPS, TOKENS, V, row_stride, seed_stride, position_stride,
    BEAMS: tl.constexpr, K: tl.constexpr, TILE: tl.constexpr, IS_NORMALISED: tl.constexpr, DRAWS: tl.constexpr,
    MASKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The highest scores of every tile, in descending order, and the tile's sum of exponentials; with `DRAWS` the
    highest of what scores, running beams and noise add up to. With `MASKS` the mask is added after that sum."""
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
    if MASKS:
        scores += tl.load(MASK + token, mask=token < V, other=0.0)
    scores = _rank(scores, token < V)
    for rank in range(K):
        top, found = tl.max(scores, 0, return_indices=True)
        is_found = top > float("-inf")  # the last tile may have fewer
        found = tl.where(is_found, found, 0)
        value = _load_unclamped(top, SCORES + row * row_stride + tile * TILE + found)
        if MASKS:
            is_odd = (top == float("inf")) | (top == LOWEST)
            value += tl.where(is_odd, tl.load(MASK + tile * TILE + found), 0.0)
        tl.store(TOPS + place * K + rank, value)
        tl.store(TOKENS + place * K + rank, tl.where(is_found, tile * TILE + found, -1))
        scores = tl.where(at == found, float("-inf"), scores)


@triton.jit(do_not_specialize=["RUNNING", "ASKED", "REPORT", "asked_stride"])
def _rank_rows(
    SCORES, PARTS, TOPS, TOKENS, RUNNING, VALUES, TOTALS, FOUND, ASKED, REPORT, num_tiles, row_stride, asked_stride,
    K: tl.constexpr, PLACES: tl.constexpr, TILES: tl.constexpr, IS_NORMALISED: tl.constexpr, DRAWS: tl.constexpr,
    ADDS: tl.constexpr, REPORTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A row's likeliest tokens, in descending order, and their log-probabilities; with `ADDS` those of the sequences
    that they make, and with `DRAWS` also what these are compared by. With `REPORTS` they are written in float64 after a
    token that was asked for and its log-probability."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, PLACES)
    let_next_start(PDL)
    wait_for_input(PDL)
    total = 0.0
    if not IS_NORMALISED:
        _, total = join_parts(PARTS, row, num_tiles, TILES)
    running = 0.0
    if ADDS:
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
            value = _load_unclamped(top, TOPS + first + place) - total
            if ADDS:
                value += running
            if REPORTS:
                tl.store(REPORT + row * (2 + 2 * K) + 2 + rank, token.to(tl.float64))
                tl.store(REPORT + row * (2 + 2 * K) + 2 + K + rank, value.to(tl.float64))
            else:
                tl.store(VALUES + row * K + rank, value)
        tl.store(FOUND + row * K + rank, token)
        tops = tl.where(at == place, float("-inf"), tops)
    if REPORTS:
        asked = tl.maximum(tl.load(ASKED + row * asked_stride), 0)  # if no token could be chosen
        tl.store(REPORT + row * (2 + 2 * K), asked.to(tl.float64))
        tl.store(REPORT + row * (2 + 2 * K) + 1, (tl.load(SCORES + row * row_stride + asked) - total).to(tl.float64))


@triton.jit
def _choose(
    VALUES, TOTALS, FOUND, ENDS, num_ends, never, PACKED, PARENTS, NEXT, RUNNING, READ, LENGTHS,
    BEAMS: tl.constexpr, K: tl.constexpr, PLACES: tl.constexpr, C: tl.constexpr, CP: tl.constexpr,
    DRAWS: tl.constexpr, BY_ORDER: tl.constexpr, GOES_ON: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A prompt's best candidates, and the beams that go on: the best that do not end, then those that do. With
    `BY_ORDER` whatever does not end comes first, if it is forbidden too. With `GOES_ON` the next pass reads the tokens
    (`READ`), and rows that are present become longer by one."""
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
    if GOES_ON:
        tl.store(READ + row, token.to(tl.int64), mask=is_kept)
        own = prompt * BEAMS + order
        length = tl.load(LENGTHS + own, mask=order < BEAMS, other=-1)
        tl.store(LENGTHS + own, length + 1, mask=(order < BEAMS) & (length >= 0))


@triton.jit(do_not_specialize=["RUNNING"])
def _choose_in_groups(
    VALUES, FOUND, RUNNING, ENDS, num_ends, never, penalty, PACKED, PARENTS, NEXT, AFTER,
    BEAMS: tl.constexpr, GROUPS: tl.constexpr, K: tl.constexpr, PLACES: tl.constexpr, C: tl.constexpr,
    CP: tl.constexpr, BP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The best candidates of each of a prompt's groups, and the beams that go on: the first that do not end. A token
    that beams of earlier groups go on with is lowered by the penalty for each of them."""
    SIZE: tl.constexpr = BEAMS // GROUPS
    prompt = tl.program_id(0).to(tl.int64)
    at, order, beams = tl.arange(0, PLACES), tl.arange(0, CP), tl.arange(0, BP)
    let_next_start(PDL)
    wait_for_input(PDL)
    is_value = at < SIZE * K
    is_there = order < C
    chosen = tl.full((BP,), -1, tl.int32)  # by beam
    for group in range(GROUPS):
        row = prompt * BEAMS + group * SIZE
        tokens = tl.load(FOUND + row * K + at, mask=is_value, other=-1)
        count = tl.zeros((PLACES,), tl.float32)
        for beam in range(group * SIZE):
            taken = tl.sum(tl.where(beams == beam, chosen, 0), 0)
            count += tl.where(tokens == taken, 1.0, 0.0)
        values = tl.load(VALUES + row * K + at, mask=is_value, other=float("-inf")) - penalty * count
        values += tl.load(RUNNING + row + at // K, mask=is_value, other=0.0)
        ranked = _rank(values, is_value)
        best = tl.full((CP,), float("-inf"), tl.float32)
        parent, token = tl.zeros((CP,), tl.int32), tl.zeros((CP,), tl.int32)
        for rank in range(C):
            _, place = tl.max(ranked, 0, return_indices=True)
            is_this, is_found = order == rank, at == place
            best = tl.where(is_this, tl.sum(tl.where(is_found, values, 0.0), 0), best)
            token = tl.where(is_this, tl.sum(tl.where(is_found, tokens, 0), 0), token)
            parent = tl.where(is_this, place // K, parent)
            ranked = tl.where(is_found, float("-inf"), ranked)
        packed = PACKED + (prompt * GROUPS + group) * 3 * C + order
        tl.store(packed, token, mask=is_there)
        tl.store(packed + C, parent, mask=is_there)
        tl.store(packed + 2 * C, best.to(tl.int32, bitcast=True), mask=is_there)
        is_end = tl.zeros((CP,), tl.int32)
        for number in range(num_ends):
            is_end += (token == tl.load(ENDS + number)).to(tl.int32)
        is_out = (is_end > 0).to(tl.int32)
        is_tie = is_out[None, :] == is_out[:, None]
        is_before = (is_out[None, :] < is_out[:, None]) | (is_tie & (order[None, :] < order[:, None]))
        rank = tl.sum((is_before & is_there[None, :]).to(tl.int32), 1)
        is_kept = is_there & (rank < SIZE)
        tl.store(PARENTS + row + rank, row + parent, mask=is_kept)
        tl.store(NEXT + row + rank, token.to(tl.int64), mask=is_kept)
        lowered = tl.where(is_end > 0, best.to(tl.float64) + never, best.to(tl.float64))
        tl.store(AFTER + row + rank, lowered.to(tl.float32), mask=is_kept)
        is_taken = is_kept[None, :] & (beams[:, None] == group * SIZE + rank[None, :])  # (beams, candidates)
        chosen = tl.where(
            tl.sum(is_taken.to(tl.int32), 1) > 0, tl.sum(tl.where(is_taken, token[None, :], 0), 1), chosen
        )


class _Ranking(NamedTuple):
    """Where the likeliest tokens of tiles and of rows are written, until the kernels after it have read them."""

    parts: torch.Tensor  # of each tile its highest score and its sum of exponentials
    tops: torch.Tensor  # of each tile its highest scores,
    tokens: torch.Tensor  # and their tokens
    values: torch.Tensor  # of each row the highest log-probabilities, or what they are compared by,
    totals: torch.Tensor  # the log-probabilities then,
    found: torch.Tensor  # and their tokens

    @classmethod
    def make(cls, rows: int, tiles: int, count: int, device: torch.device) -> _Ranking:
        """Memory for the `count` likeliest tokens of rows that have so many tiles."""
        sizes = [rows * tiles * 2, rows * tiles * count, rows * count, rows * count]
        numbers = [rows * tiles * count, rows * count]
        parts, tops, values, totals = torch.empty(sum(sizes), dtype=torch.float32, device=device).split(sizes)
        tokens, found = torch.empty(sum(numbers), dtype=torch.int32, device=device).split(numbers)
        return cls(parts, tops, tokens, values, totals, found)


_kept: Final = KeptReplays[_Ranking](most=16)


def _find_likeliest(
    scores: torch.Tensor,  # (rows, vocab), rows that lie whole
    count: int,
    *,
    is_normalised: bool,
    running: torch.Tensor | None = None,  # (rows,): what is added
    drawing: tuple[torch.Tensor, torch.Tensor] | None = None,  # seeds and positions
    num_beams: int = 1,
    mask: torch.Tensor | None = None,  # (vocab,) float32: 0 or -inf, added once scores are normalised
    reporting: tuple[torch.Tensor, torch.Tensor] | None = None,  # tokens, and where the report is written
) -> _Ranking:
    """Rank the `count` likeliest tokens of every tile, and then of every row."""
    rows, vocab = scores.shape
    tiles, options, device = count_parts(vocab, TILE), launch_options(), scores.device
    ranked = _kept.lend((rows, tiles, count), device, lambda: _Ranking.make(rows, tiles, count, device))
    seeds, positions = (ranked.found, ranked.found) if drawing is None else drawing  # read if it draws
    added = ranked.values if running is None else running
    asked, report = (ranked.found, ranked.values) if reporting is None else reporting
    launch(
        _rank_tiles,
        (rows, tiles),
        scores,
        added,
        seeds,
        positions,
        ranked.values if mask is None else mask,  # read if there is one
        ranked.parts,
        ranked.tops,
        ranked.tokens,
        vocab,
        scores.stride(0),
        seeds.stride(0),
        positions.stride(0),
        BEAMS=num_beams,
        K=count,
        TILE=TILE,
        IS_NORMALISED=is_normalised,
        DRAWS=drawing is not None,
        MASKS=mask is not None,
        num_warps=8,
        **options,
    )
    launch(
        _rank_rows,
        (rows,),
        scores,
        ranked.parts,
        ranked.tops,
        ranked.tokens,
        added,
        ranked.values,
        ranked.totals,
        ranked.found,
        asked,
        report,
        tiles,
        scores.stride(0),
        asked.stride(0),
        K=count,
        PLACES=max(2, round_up(tiles * count)),
        TILES=max(2, round_up(tiles)),
        IS_NORMALISED=is_normalised,
        DRAWS=drawing is not None,
        ADDS=running is not None,
        REPORTS=reporting is not None,
        **options,
    )
    return ranked


class Chosen(NamedTuple):
    """A step's candidates, and which of them go on."""

    packed: torch.Tensor  # (…, 3, candidates) int32: tokens, the beams that they continue, log-probabilities' bits
    parents: torch.Tensor  # (rows,) int64: the row that each comes from
    tokens: torch.Tensor  # (rows,) int64: its next token
    running: torch.Tensor  # (rows,) float32: its log-probability

    @classmethod
    def make(cls, rows: int, shape: tuple[int, ...], device: torch.device) -> Chosen:
        parents, tokens = torch.empty(2, rows, dtype=torch.int64, device=device).unbind()
        packed = torch.empty(shape, dtype=torch.int32, device=device)
        return cls(packed, parents, tokens, torch.empty(rows, dtype=torch.float32, device=device))


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
    mask: torch.Tensor | None = None,  # (vocab,) float32: 0, or -inf for a token that is forbidden to all
    chosen: Chosen | None = None,
    next_pass: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> Chosen:
    """The candidates of a step, and which of them go on; a sequence that ends is lowered by `never`. With `drawing`
    candidates are drawn from log-probabilities instead of taken by them. With `by_order` no candidate that ends goes on
    before one that does not, however low.

    They are written into `chosen` if it is given, whose `running` may be the one that is read. With `next_pass` the
    tokens become what a pass reads, (rows,) int64, and its rows' lengths, (rows,) int32, grow by one but for those
    that are absent (-1).

    Returns (prompts, 3, candidates) int32: tokens, the beams that they continue, the bits of their log-probabilities;
    and of every row that goes on the row that it comes from, its next token (int64 both), and its log-probability.
    """
    assert is_normalised or drawing is None
    scores = lay_in_rows(scores)
    rows, vocab = scores.shape
    prompts, few = rows // num_beams, min(num_candidates, vocab)
    ranked = _find_likeliest(
        scores, few, is_normalised=is_normalised, running=running, drawing=drawing, num_beams=num_beams, mask=mask
    )
    if chosen is None:
        chosen = Chosen.make(rows, (prompts, 3, num_candidates), scores.device)
    read, lengths = next_pass or (chosen.tokens, chosen.tokens)  # used if there is a next pass
    launch(
        _choose,
        (prompts,),
        ranked.values,
        ranked.totals,
        ranked.found,
        ends,
        ends.numel(),
        never,
        *chosen,
        read,
        lengths,
        BEAMS=num_beams,
        K=few,
        PLACES=max(2, round_up(num_beams * few)),
        C=num_candidates,
        CP=max(2, round_up(num_candidates)),
        DRAWS=drawing is not None,
        BY_ORDER=by_order,
        GOES_ON=next_pass is not None,
        **launch_options(),
    )
    return chosen


def choose_in_groups(
    scores: torch.Tensor,  # (rows, vocab) float32: logits, or log-probabilities if they are normalised
    running: torch.Tensor,  # (rows,) float32
    ends: torch.Tensor,  # (any,) int64: tokens that end a sequence
    *,
    num_beams: int,
    num_groups: int,
    num_candidates: int,  # of a group
    num_ranked: int,  # tokens of a row that can be among them: more, by what earlier groups can lower
    penalty: float,
    never: float,
    is_normalised: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`choose_beams` by order, of groups of a prompt's beams one after the other: each candidate is lowered by the
    penalty for every beam of an earlier group that goes on with its token.

    Returns (prompts, groups, 3, candidates) and what goes on, as `choose_beams` does.
    """
    scores = lay_in_rows(scores)
    rows, vocab = scores.shape
    prompts, few = rows // num_beams, min(num_ranked, vocab)
    ranked = _find_likeliest(scores, few, is_normalised=is_normalised)
    chosen = Chosen.make(rows, (prompts, num_groups, 3, num_candidates), scores.device)
    launch(
        _choose_in_groups,
        (prompts,),
        ranked.values,
        ranked.found,
        running,
        ends,
        ends.numel(),
        never,
        penalty,
        *chosen,
        BEAMS=num_beams,
        GROUPS=num_groups,
        K=few,
        PLACES=max(2, round_up(num_beams // num_groups * few)),
        C=num_candidates,
        CP=max(2, round_up(num_candidates)),
        BP=max(2, round_up(num_beams)),
        **launch_options(),
    )
    return chosen


def report_logprobs(logits: torch.Tensor, tokens: torch.Tensor, count: int) -> torch.Tensor:
    """The log-probabilities of tokens (rows,) and of the `count` likeliest under logits (rows, vocab) float32, as
    (rows, 2 + 2 * count) float64: the token (0 if it is negative), its own, the likeliest tokens, theirs."""
    logits = lay_in_rows(logits)
    report = torch.empty(len(logits), 2 + 2 * count, dtype=torch.float64, device=logits.device)
    _find_likeliest(logits, count, is_normalised=False, reporting=(tokens, report))
    return report
