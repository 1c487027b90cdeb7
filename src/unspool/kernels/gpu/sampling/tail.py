"""A sampling tail in two kernels: temperature, top-k, top-p, min-p, further cuts and the draw, without a sort.

The reference is `decoding.tails.draw_by_operators`, some twenty operators. Here the first kernel finds the maxima of
groups of scores. The k-th largest score is no lower than the k-th largest maximum, so the second one, one program per
row, reads only the groups whose maximum is that high, and ranks the few scores there by comparing them with each other.
If too many scores tie to fit, passes over the whole row are used instead: slower, with the same result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl

from unspool.kernels.gpu.arguments import count_parts, find_step, lay_in_rows, round_up
from unspool.kernels.gpu.launching import launch, launch_options, let_next_start, wait_for_input
from unspool.kernels.gpu.sampling.replays import KeptReplays
from unspool.kernels.gpu.sampling.slow_tail import draw_slowly, load_scores, temper
from unspool.kernels.gpu.sampling.tail_cuts import cut_candidates

FEWEST_GROUPS: Final = 1_024  # if the vocabulary has as many tokens
LARGEST_GROUP: Final = 128
RUN: Final = 8  # contiguous tokens of a group: 32 bytes, the smallest memory transaction
TILE: Final = 1_024  # scores per program of the first kernel
CHUNK: Final = 4_096  # scores that the second kernel processes at once
SLOW_CHUNK: Final = 1_024  # if it needs many passes
PAIRS: Final = 4_096  # that it compares at once
FEWEST_PLACES: Final = 128  # for candidates
SPARE_PLACES: Final = 40  # groups may hold more than one
ALIGNED: Final = 4  # numbers: kernels are compiled for addresses that are multiples of 16 bytes, and for others


@dataclass(frozen=True, slots=True)
class TailSettings:
    """A tail's settings, one for all rows or one per row: (rows or 1, 1) each, on the scores' device."""

    top_k: torch.Tensor  # int64, above 0
    largest_k: int
    temperature: torch.Tensor | None = None  # float32
    top_p: torch.Tensor | None = None  # float64: a token is kept while the tokens above it sum to less
    fewest: int = 1  # the fewest tokens that top-p keeps
    min_p: torch.Tensor | None = None  # float32: logarithms
    # Cut after these, in this order, float32: logarithms, but for `typical`, which is a probability.
    top_a: torch.Tensor | None = None
    typical: torch.Tensor | None = None
    epsilon: torch.Tensor | None = None
    eta: torch.Tensor | None = None


@triton.jit
def _find_tops(
    SCORES, TOPS, V, G, row_stride,
    STRIPS: tl.constexpr, RUN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The highest of every group's scores; infinity if one of them is NaN."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK * RUN + tl.arange(0, BLOCK * RUN)
    token = tl.arange(0, STRIPS)[:, None] * (G * RUN) + column[None, :]
    let_next_start(PDL)
    wait_for_input(PDL)
    is_there = (column < G * RUN)[None, :] & (token < V)
    scores = tl.load(SCORES + row * row_stride + token, mask=is_there, other=float("-inf"))
    scores = tl.where(scores == scores, scores, float("inf"))
    tops = tl.max(tl.reshape(tl.max(scores, 0), (BLOCK, RUN)), 1)
    group = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(TOPS + row * G + group, tops, mask=group < G)


@triton.jit
def find_bound(tops, highest, k):
    """A number that at least k scores reach; minus infinity if fewer groups are finite."""
    low = tl.min(tl.where(tops > float("-inf"), tops, highest), 0)
    num_chosen = tl.sum((tops >= low).to(tl.int32), 0)
    low = tl.where(num_chosen >= k, low, float("-inf"))
    high = highest
    num_steps = 0
    while (num_chosen > k + k // 8 + 8) & (num_steps < 32):
        middle = low * 0.5 + high * 0.5
        count = tl.sum((tops >= middle).to(tl.int32), 0)
        low = tl.where(count >= k, middle, low)
        num_chosen = tl.where(count >= k, count, num_chosen)
        high = tl.where(count >= k, high, middle)
        num_steps += 1
    return low


# Single numbers of a row are loaded from these pointers: a kernel for every alignment and stride would gain nothing.
_SINGLE: Final = ("UNIFORMS", "TEMPERATURE", "TOP_K", "TOP_P", "MIN_P", "TOP_A", "TYPICAL", "EPSILON", "ETA", "OUT")
_STRIDES: Final = ("temperature_stride", "k_stride", "p_stride", "min_p_stride", "fewest")
_STRIDES_AFTER: Final = ("a_stride", "typical_stride", "epsilon_stride", "eta_stride")


@triton.jit(do_not_specialize=[*_SINGLE, *_STRIDES, *_STRIDES_AFTER])
def _draw(
    SCORES, TOPS, GROUPS, VALUES, TOKENS, UNIFORMS, TEMPERATURE, TOP_K, TOP_P, MIN_P, TOP_A, TYPICAL, EPSILON, ETA,
    OUT, V, G, row_stride, temperature_stride, k_stride, p_stride, min_p_stride,
    a_stride, typical_stride, epsilon_stride, eta_stride, fewest,
    IS_TEMPERED: tl.constexpr, HAS_TOP_P: tl.constexpr, HAS_MIN_P: tl.constexpr, HAS_AFTER: tl.constexpr,
    HAS_TOP_A: tl.constexpr, HAS_TYPICAL: tl.constexpr, HAS_EPSILON: tl.constexpr, HAS_ETA: tl.constexpr,
    STRIPS: tl.constexpr, RUN: tl.constexpr, ALL: tl.constexpr, ROOM: tl.constexpr, BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr, TOGETHER: tl.constexpr, SLOW_COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    SCORES += row * row_stride
    GROUPS += row * G
    VALUES += row * ROOM
    TOKENS += row * ROOM
    let_next_start(PDL)
    temperature = 1.0
    if IS_TEMPERED:
        temperature = tl.load(TEMPERATURE + row * temperature_stride)
    k = tl.minimum(tl.load(TOP_K + row * k_stride), V).to(tl.int32)
    top_p = 2.0
    if HAS_TOP_P:
        top_p = tl.load(TOP_P + row * p_stride)
    top_a, typical, epsilon, eta = 0.0, 0.0, 0.0, 0.0
    if HAS_TOP_A:
        top_a = tl.load(TOP_A + row * a_stride)
    if HAS_TYPICAL:
        typical = tl.load(TYPICAL + row * typical_stride)
    if HAS_EPSILON:
        epsilon = tl.load(EPSILON + row * epsilon_stride)
    if HAS_ETA:
        eta = tl.load(ETA + row * eta_stride)
    group = tl.arange(0, ALL)
    wait_for_input(PDL)
    uniform = tl.load(UNIFORMS + row)
    tops = tl.load(TOPS + row * G + group, mask=group < G, other=float("-inf"))
    tops = tl.where(group < G, temper(tops, temperature, IS_TEMPERED), float("-inf"))
    highest = tl.max(tops, 0)
    chosen = tl.full((), -1, tl.int64)
    if (highest > float("-inf")) & (highest < float("inf")):
        floor = float("-inf")
        if HAS_MIN_P:
            floor = highest + tl.load(MIN_P + row * min_p_stride)
        bound = find_bound(tops, highest, k)
        is_chosen = (tops >= bound) & (tops > float("-inf"))
        number = tl.cumsum(is_chosen.to(tl.int32), 0)
        tl.store(GROUPS + number - 1, group, mask=is_chosen)
        num_chosen = tl.max(number, 0)
        tl.debug_barrier()
        # Candidates are stored in ascending order of their tokens.
        num_found = tl.zeros((), tl.int32)
        for first in range(0, STRIPS, TOGETHER):
            at = tl.arange(0, TOGETHER * COLUMNS)
            values, tokens = load_scores(
                SCORES, GROUPS, V, G, num_chosen, temperature, first + at // COLUMNS, at % COLUMNS, RUN, IS_TEMPERED
            )
            is_found = (values >= bound) & (values > float("-inf"))
            place = num_found + tl.cumsum(is_found.to(tl.int32), 0)
            has_room = is_found & (place <= ROOM)
            tl.store(VALUES + place - 1, values, mask=has_room)
            tl.store(TOKENS + place - 1, tokens, mask=has_room)
            num_found = tl.max(place, 0)
        tl.debug_barrier()
        if (num_found <= ROOM) & (num_chosen * RUN <= COLUMNS):
            at = tl.arange(0, ROOM)
            value = tl.load(VALUES + at, mask=at < num_found, other=float("-inf"))
            rank = tl.zeros((ROOM,), tl.int32)  # of equal scores the earlier token comes first
            above = tl.zeros((ROOM,), tl.float64)  # the weight of what comes before
            for first in range(0, num_found, BLOCK):
                other = first + tl.arange(0, BLOCK)
                its_value = tl.load(VALUES + other, mask=other < num_found, other=float("-inf"))
                is_tie = its_value[None, :] == value[:, None]
                is_before = (its_value[None, :] > value[:, None]) | (is_tie & (other[None, :] < at[:, None]))
                rank += tl.sum(is_before.to(tl.int32), 1)
                if HAS_TOP_P:
                    its_weight = tl.exp(its_value - highest).to(tl.float64)
                    above += tl.sum(tl.where(is_before, its_weight[None, :], 0.0), 1)
            threshold = tl.max(tl.where(rank == k - 1, value, float("-inf")), 0)
            is_kept = (value >= threshold) & (at < num_found)
            if HAS_TOP_P:
                whole = tl.sum(tl.where(is_kept, tl.exp(value - highest), 0.0).to(tl.float64), 0)
                is_kept = is_kept & ((above < top_p * whole) | (rank < fewest))
            is_kept = is_kept & (value >= floor)
            if HAS_AFTER:
                is_kept = cut_candidates(
                    VALUES, value, is_kept, num_found, highest, top_a, typical, epsilon, eta,
                    HAS_TOP_A, HAS_TYPICAL, HAS_EPSILON, HAS_ETA, ROOM, BLOCK,
                )  # fmt: skip
            share = tl.where(is_kept, tl.exp(value.to(tl.float64) - highest.to(tl.float64)), 0.0)
            passed = tl.cumsum(share, 0)
            target = uniform * tl.max(passed, 0)
            drawn = tl.min(tl.where((share > 0.0) & (passed > target), at, ROOM), 0)
            last = tl.max(tl.where(share > 0.0, at, 0), 0)  # in case rounding lets none pass
            chosen = tl.load(TOKENS + tl.minimum(drawn, last)).to(tl.int64)
        else:
            chosen = draw_slowly(
                SCORES, GROUPS, V, G, num_chosen, temperature, highest, bound, k, top_p, fewest, floor, uniform,
                top_a, typical, epsilon, eta,
                STRIPS, RUN, SLOW_COLUMNS, IS_TEMPERED, HAS_TOP_P, HAS_AFTER, HAS_TOP_A, HAS_TYPICAL, HAS_EPSILON,
                HAS_ETA,
            )  # fmt: skip
    tl.store(OUT + row, chosen)


class _Work(NamedTuple):
    """Memory of a draw: what the groups of a row amount to, and its candidates."""

    tops: torch.Tensor
    groups: torch.Tensor
    values: torch.Tensor
    tokens: torch.Tensor

    @classmethod
    def make(cls, rows: int, num_groups: int, room: int, device: torch.device) -> _Work:
        before = count_parts(rows * num_groups, ALIGNED) * ALIGNED
        floats = torch.empty(before + rows * room, dtype=torch.float32, device=device)
        numbers = torch.empty(before + rows * room, dtype=torch.int32, device=device)
        return cls(floats, numbers, floats[before:], numbers[before:])


_kept: Final = KeptReplays[_Work]()


def draw_tail(scores: torch.Tensor, uniforms: torch.Tensor, settings: TailSettings) -> torch.Tensor:
    """The tokens (rows,) drawn by uniforms (rows,) float64 from what a tail leaves of scores (rows, vocab) float32.

    -1 if there is none: no score is finite, or one of them is NaN.
    """
    scores = lay_in_rows(scores)
    uniforms = uniforms.contiguous()
    rows, vocab = scores.shape
    group = choose_group(vocab, settings.largest_k)
    run, num_groups = min(RUN, group), count_parts(vocab, group)
    most_chosen = round_up(count_chosen(settings.largest_k))
    room = max(FEWEST_PLACES, round_up(count_chosen(settings.largest_k) + SPARE_PLACES))
    columns = min(most_chosen, round_up(num_groups)) * run
    work = _kept.lend(
        (rows, num_groups, room), scores.device, lambda: _Work.make(rows, num_groups, room, scores.device)
    )
    tokens = torch.empty(rows, dtype=torch.int64, device=scores.device)
    after = (settings.top_a, settings.typical, settings.epsilon, settings.eta)
    options = launch_options()
    block = TILE // group
    launch(
        _find_tops,
        (rows, count_parts(num_groups, block)),
        scores,
        work.tops,
        vocab,
        num_groups,
        scores.stride(0),
        STRIPS=group // run,
        RUN=run,
        BLOCK=block,
        **options,
    )
    launch(
        _draw,
        (rows,),
        scores,
        work.tops,
        work.groups,
        work.values,
        work.tokens,
        uniforms,
        uniforms if settings.temperature is None else settings.temperature,
        settings.top_k,
        uniforms if settings.top_p is None else settings.top_p,
        uniforms if settings.min_p is None else settings.min_p,
        *(uniforms if one is None else one for one in after),
        tokens,
        vocab,
        num_groups,
        scores.stride(0),
        find_step(settings.temperature),
        find_step(settings.top_k),
        find_step(settings.top_p),
        find_step(settings.min_p),
        *map(find_step, after),
        settings.fewest,
        IS_TEMPERED=settings.temperature is not None,
        HAS_TOP_P=settings.top_p is not None,
        HAS_MIN_P=settings.min_p is not None,
        HAS_AFTER=any(one is not None for one in after),
        HAS_TOP_A=settings.top_a is not None,
        HAS_TYPICAL=settings.typical is not None,
        HAS_EPSILON=settings.epsilon is not None,
        HAS_ETA=settings.eta is not None,
        STRIPS=group // run,
        RUN=run,
        ALL=round_up(num_groups),
        ROOM=room,
        BLOCK=max(2, PAIRS // room),
        COLUMNS=columns,
        TOGETHER=max(1, min(group // run, CHUNK // columns)),
        SLOW_COLUMNS=SLOW_CHUNK,
        num_warps=8 if columns <= CHUNK else 16,
        **options,
    )
    return tokens


def choose_group(vocab: int, k: int) -> int:
    """The number of tokens per group: so few that there are many more groups than are read."""
    fewest_groups = max(FEWEST_GROUPS, 4 * k)
    largest = min(LARGEST_GROUP, vocab // fewest_groups)
    return int(round_up(largest + 1)) // 2 if largest else 1


def count_chosen(k: int) -> int:
    """The most groups that pass the bound, except for ties: a tighter bound would cost more."""
    return k + k // 8 + 8
