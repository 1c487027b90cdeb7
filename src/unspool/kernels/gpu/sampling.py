"""A sampling tail in two kernels: temperature, top-k, top-p, min-p and the draw, without a sort.

The reference is `decoding.tails.draw_by_operators`, some twenty operators. Here the first kernel finds the maxima of
groups of scores. The k-th largest score is no lower than the k-th largest maximum, so the second one, a program a row,
reads only the groups whose maximum is that high, and ranks the few scores it finds there by comparing them with each
other. Scores that tie in such numbers that there is no room for them are weighed in passes over the whole row instead:
slowly, and with the same result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl

from unspool.kernels.gpu.launching import launch, launch_options, let_next_start, wait_for_input

FEWEST_GROUPS: Final = 1_024  # where the vocabulary has as many tokens
LARGEST_GROUP: Final = 128
RUN: Final = 8  # tokens of a group that lie side by side: 32 bytes, the least that is read
TILE: Final = 1_024  # scores a program of the first kernel looks at
CHUNK: Final = 4_096  # scores that the second kernel looks at together
SLOW_CHUNK: Final = 1_024  # where it looks at all of a row
PAIRS: Final = 4_096  # that it compares together
FEWEST_PLACES: Final = 128  # for candidates
SPARE_PLACES: Final = 40  # beyond those that the bound may let through: groups may hold more than one


@dataclass(frozen=True, slots=True)
class TailSettings:
    """A tail's numbers, one for all rows or one a row: (rows or 1, 1) each, where the scores are."""

    top_k: torch.Tensor  # int64, above 0
    largest_k: int
    temperature: torch.Tensor | None = None  # float32
    top_p: torch.Tensor | None = None  # float64: a token stays while those above it have less
    fewest: int = 1  # tokens that top-p leaves at least
    min_p: torch.Tensor | None = None  # float32: logarithms


@triton.jit
def _find_tops(
    SCORES, TOPS, V, G, row_stride,
    SLICES: tl.constexpr, RUN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The highest of every group's scores; infinity where one of them is no number."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK * RUN + tl.arange(0, BLOCK * RUN)
    token = tl.arange(0, SLICES)[:, None] * (G * RUN) + column[None, :]
    let_next_start(PDL)
    wait_for_input(PDL)
    is_there = (column < G * RUN)[None, :] & (token < V)
    scores = tl.load(SCORES + row * row_stride + token, mask=is_there, other=float("-inf"))
    scores = tl.where(scores == scores, scores, float("inf"))
    tops = tl.max(tl.reshape(tl.max(scores, 0), (BLOCK, RUN)), 1)
    group = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(TOPS + row * G + group, tops, mask=group < G)


@triton.jit
def _temper(scores, temperature, IS_TEMPERED: tl.constexpr):
    """Scores over the temperature, rounded as torch rounds them; infinity where that is no number."""
    if IS_TEMPERED:
        scores = tl.div_rn(scores, tl.zeros_like(scores) + temperature)
        scores = tl.where(scores == scores, scores, float("inf"))
    return scores


@triton.jit
def _find_bound(tops, highest, k):
    """A number that at least k scores reach, and how many groups do; minus infinity where fewer groups are finite."""
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
    return low, num_chosen


@triton.jit
def _order(value):
    """A whole number that rises with a float."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _unorder(order):
    bits = order.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _weigh(SCORES, V, temperature, highest, least, IS_TEMPERED: tl.constexpr, CHUNK: tl.constexpr):
    """How many of a row's scores are not below `least`, and their weights' sum; the highest weighs one."""
    counts = tl.zeros((CHUNK,), tl.int32)
    weights = tl.zeros((CHUNK,), tl.float64)
    for first in range(0, V, CHUNK):
        token = first + tl.arange(0, CHUNK)
        value = tl.load(SCORES + token, mask=token < V, other=float("-inf"))
        value = _temper(value, temperature, IS_TEMPERED)
        is_in = (value >= least) & (token < V)
        counts += is_in.to(tl.int32)
        weights += tl.where(is_in, tl.exp(value - highest), 0.0).to(tl.float64)
    return tl.sum(counts, 0), tl.sum(weights, 0)


@triton.jit
def _find_cut(
    SCORES, V, temperature, highest, low, least_count, least_weight,
    IS_TEMPERED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The highest number, not below `low`, that so many scores of so much weight reach (in `_order`)."""
    high = _order(highest) + 1
    while high - low > 1:
        middle = low + (high - low) // 2
        count, weight = _weigh(SCORES, V, temperature, highest, _unorder(middle), IS_TEMPERED, CHUNK)
        is_enough = (count >= least_count) & (weight >= least_weight)
        low = tl.where(is_enough, middle, low)
        high = tl.where(is_enough, high, middle)
    return low


@triton.jit
def _draw_slowly(
    SCORES, V, temperature, highest, bound, k, top_p, fewest, floor, uniform,
    IS_TEMPERED: tl.constexpr, HAS_TOP_P: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """A row's token by passes over all of it: thresholds are found by bisection, and of ties the first stay."""
    low = _find_cut(SCORES, V, temperature, highest, _order(bound), k, 0.0, IS_TEMPERED, CHUNK)
    cut = _unorder(low)  # what is below it goes, and of what is equal all but the first `num_ties`
    num_ties = tl.zeros((), tl.int64) + V
    if HAS_TOP_P:
        if top_p <= 1.0:
            _, whole = _weigh(SCORES, V, temperature, highest, cut, IS_TEMPERED, CHUNK)
            wanted = top_p * whole
            low = _find_cut(SCORES, V, temperature, highest, low, fewest, wanted, IS_TEMPERED, CHUNK)
            cut = _unorder(low)
            num_above, above = _weigh(SCORES, V, temperature, highest, _unorder(low + 1), IS_TEMPERED, CHUNK)
            num_needed = tl.ceil((wanted - above) / tl.exp(cut - highest).to(tl.float64))
            num_needed = tl.where(wanted > above, num_needed, 0.0).to(tl.int64)
            num_ties = tl.maximum(num_needed, tl.zeros((), tl.int64) + fewest - num_above)
    total = tl.zeros((), tl.float64)
    chosen = tl.full((), -1, tl.int64)
    is_open = tl.full((), 1, tl.int32)
    for turn in range(2):  # the first time round only the total is found
        target = uniform * total
        reached = tl.zeros((), tl.float64)
        num_before = tl.zeros((), tl.int64)
        for first in range(0, V, CHUNK):
            token = first + tl.arange(0, CHUNK)
            value = tl.load(SCORES + token, mask=token < V, other=float("-inf"))
            value = _temper(value, temperature, IS_TEMPERED)
            is_tie = ((value == cut) & (token < V)).to(tl.int64)
            number = num_before + tl.cumsum(is_tie, 0)  # from 1 on
            is_kept = ((value > cut) | ((is_tie > 0) & (number <= num_ties))) & (value >= floor) & (token < V)
            share = tl.where(is_kept, tl.exp(value.to(tl.float64) - highest.to(tl.float64)), 0.0)
            passed = reached + tl.cumsum(share, 0)
            is_drawn = (share > 0.0) & (passed > target)
            drawn = tl.min(tl.where(is_drawn, token, V), 0)
            last = tl.max(tl.where(share > 0.0, token, -1), 0)  # in case rounding lets none pass
            if (turn == 1) & (is_open > 0):
                chosen = tl.where(drawn < V, drawn, tl.where(last >= 0, last, chosen)).to(tl.int64)
                is_open = tl.where(drawn < V, 0, 1)
            num_before += tl.sum(is_tie, 0)
            reached += tl.sum(share, 0)
        if turn == 0:
            total = reached
    return chosen


@triton.jit
def _draw(
    SCORES, TOPS, GROUPS, VALUES, TOKENS, SHARES, UNIFORMS, TEMPERATURE, TOP_K, TOP_P, MIN_P, OUT,
    V, G, row_stride, temperature_stride, k_stride, p_stride, min_p_stride, fewest,
    IS_TEMPERED: tl.constexpr, HAS_TOP_P: tl.constexpr, HAS_MIN_P: tl.constexpr,
    GROUP: tl.constexpr, RUN: tl.constexpr, ALL: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr,
    CHUNK: tl.constexpr, SLOW_CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    SCORES += row * row_stride
    GROUPS += row * G
    VALUES += row * C
    TOKENS += row * C
    SHARES += row * C
    let_next_start(PDL)
    group = tl.arange(0, ALL)
    temperature = 1.0
    if IS_TEMPERED:
        temperature = tl.load(TEMPERATURE + row * temperature_stride)
    k = tl.minimum(tl.load(TOP_K + row * k_stride), V).to(tl.int32)
    wait_for_input(PDL)
    uniform = tl.load(UNIFORMS + row)
    tops = tl.load(TOPS + row * G + group, mask=group < G, other=float("-inf"))
    tops = _temper(tops, temperature, IS_TEMPERED)
    tops = tl.where(group < G, tops, float("-inf"))
    highest = tl.max(tops, 0)
    chosen = tl.full((), -1, tl.int64)
    if (highest > float("-inf")) & (highest < float("inf")):
        floor = float("-inf")
        if HAS_MIN_P:
            floor = highest + tl.load(MIN_P + row * min_p_stride)
        top_p = 2.0
        if HAS_TOP_P:
            top_p = tl.load(TOP_P + row * p_stride)
        bound, _ = _find_bound(tops, highest, k)
        is_chosen = (tops >= bound) & (tops > float("-inf"))
        tl.store(GROUPS + tl.cumsum(is_chosen.to(tl.int32), 0) - 1, group, mask=is_chosen)
        num_chosen = tl.sum(is_chosen.to(tl.int32), 0)
        tl.debug_barrier()
        num_found = 0
        for first in range(0, num_chosen * GROUP, CHUNK):
            at = first + tl.arange(0, CHUNK)
            is_there = at < num_chosen * GROUP
            its_group = tl.load(GROUPS + at // GROUP, mask=is_there, other=0)
            token = at % GROUP // RUN * (G * RUN) + its_group * RUN + at % RUN
            is_there = is_there & (token < V)
            value = tl.load(SCORES + token, mask=is_there, other=float("-inf"))
            value = _temper(value, temperature, IS_TEMPERED)
            is_found = is_there & (value >= bound) & (value > float("-inf"))
            number = num_found + tl.cumsum(is_found.to(tl.int32), 0) - 1
            has_room = is_found & (number < C)
            tl.store(VALUES + number, value, mask=has_room)
            tl.store(TOKENS + number, token, mask=has_room)
            num_found += tl.sum(is_found.to(tl.int32), 0)
        tl.debug_barrier()
        if num_found <= C:
            at = tl.arange(0, C)
            value = tl.load(VALUES + at, mask=at < num_found, other=float("-inf"))
            token = tl.load(TOKENS + at, mask=at < num_found, other=0)
            rank = tl.zeros((C,), tl.int32)  # by score, of equals the earlier token first
            place = tl.zeros((C,), tl.int32)  # by token
            for first in range(0, num_found, BLOCK):
                other = first + tl.arange(0, BLOCK)
                its_value = tl.load(VALUES + other, mask=other < num_found, other=float("-inf"))
                its_token = tl.load(TOKENS + other, mask=other < num_found, other=V)
                is_earlier = its_token[None, :] < token[:, None]
                is_tie = its_value[None, :] == value[:, None]
                is_before = (its_value[None, :] > value[:, None]) | (is_tie & is_earlier)
                rank += tl.sum(is_before.to(tl.int32), 1)
                place += tl.sum(is_earlier.to(tl.int32), 1)
            threshold = tl.max(tl.where(rank == k - 1, value, float("-inf")), 0)
            is_kept = (value >= threshold) & (at < num_found)
            if HAS_TOP_P:
                weight = tl.where(is_kept, tl.exp(value - highest), 0.0)
                whole = tl.sum(weight, 0)
                reached = tl.zeros((C,), tl.float64)
                for first in range(0, num_found, BLOCK):
                    other = first + tl.arange(0, BLOCK)
                    its_value = tl.load(VALUES + other, mask=other < num_found, other=float("-inf"))
                    its_token = tl.load(TOKENS + other, mask=other < num_found, other=0)
                    its_share = tl.where(its_value >= threshold, tl.exp(its_value - highest) / whole, 0.0)
                    is_earlier = its_token[None, :] < token[:, None]
                    is_tie = its_value[None, :] == value[:, None]
                    is_before = (its_value[None, :] > value[:, None]) | (is_tie & is_earlier)
                    its_share = tl.zeros((C, 1), tl.float64) + its_share.to(tl.float64)[None, :]
                    reached += tl.sum(tl.where(is_before, its_share, 0.0), 1)
                is_kept = is_kept & ((reached < top_p) | (rank < fewest))
            is_kept = is_kept & (value >= floor)
            share = tl.where(is_kept, tl.exp(value.to(tl.float64) - highest.to(tl.float64)), 0.0)
            share = share / tl.sum(share, 0)
            tl.debug_barrier()  # all have read what is written now
            tl.store(SHARES + place, share, mask=at < num_found)
            tl.store(TOKENS + place, token, mask=at < num_found)
            tl.debug_barrier()
            share = tl.load(SHARES + at, mask=at < num_found, other=0.0)
            passed = tl.cumsum(share, 0)
            target = uniform * tl.max(passed, 0)
            drawn = tl.min(tl.where((share > 0.0) & (passed > target), at, C), 0)
            last = tl.max(tl.where(share > 0.0, at, 0), 0)  # in case rounding lets none pass
            chosen = tl.load(TOKENS + tl.minimum(drawn, last)).to(tl.int64)
        else:
            chosen = _draw_slowly(
                SCORES, V, temperature, highest, bound, k, top_p, fewest, floor, uniform,
                IS_TEMPERED, HAS_TOP_P, SLOW_CHUNK,
            )  # fmt: skip
    tl.store(OUT + row, chosen)


def draw_tail(scores: torch.Tensor, uniforms: torch.Tensor, settings: TailSettings) -> torch.Tensor:
    """The tokens (rows,) drawn by uniforms (rows,) float64 from what a tail leaves of scores (rows, vocab) float32.

    -1 stands where there is none: where no score is possible, or one of them is no number.
    """
    scores = scores if scores.stride(1) == 1 else scores.contiguous()
    uniforms = uniforms.contiguous()
    rows, vocab = scores.shape
    group = choose_group(vocab, settings.largest_k)
    run, num_groups = min(RUN, group), triton.cdiv(vocab, group)
    room = choose_room(settings.largest_k)
    floats = torch.empty(rows * (num_groups + room), dtype=torch.float32, device=scores.device)
    whole = torch.empty(rows * (num_groups + room), dtype=torch.int32, device=scores.device)
    shares = torch.empty(rows * room, dtype=torch.float64, device=scores.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=scores.device)
    options = launch_options()
    block = TILE // group
    launch(
        _find_tops,
        (rows, triton.cdiv(num_groups, block)),
        scores,
        floats,
        vocab,
        num_groups,
        scores.stride(0),
        SLICES=group // run,
        RUN=run,
        BLOCK=block,
        **options,
    )
    launch(
        _draw,
        (rows,),
        scores,
        floats,
        whole,
        floats[rows * num_groups :],
        whole[rows * num_groups :],
        shares,
        uniforms,
        uniforms if settings.temperature is None else settings.temperature,
        settings.top_k,
        uniforms if settings.top_p is None else settings.top_p,
        uniforms if settings.min_p is None else settings.min_p,
        tokens,
        vocab,
        num_groups,
        scores.stride(0),
        _find_stride(settings.temperature),
        _find_stride(settings.top_k),
        _find_stride(settings.top_p),
        _find_stride(settings.min_p),
        settings.fewest,
        IS_TEMPERED=settings.temperature is not None,
        HAS_TOP_P=settings.top_p is not None,
        HAS_MIN_P=settings.min_p is not None,
        GROUP=group,
        RUN=run,
        ALL=triton.next_power_of_2(num_groups),
        C=room,
        BLOCK=PAIRS // room,
        CHUNK=CHUNK,
        SLOW_CHUNK=SLOW_CHUNK,
        num_warps=8,
        **options,
    )
    return tokens


def choose_group(vocab: int, k: int) -> int:
    """How many tokens a group has: so few that there are many more groups than are looked into."""
    fewest_groups = max(FEWEST_GROUPS, 4 * k)
    largest = min(LARGEST_GROUP, vocab // fewest_groups)
    return int(triton.next_power_of_2(largest + 1)) // 2 if largest else 1


def choose_room(k: int) -> int:
    """How many candidates are ranked."""
    return max(FEWEST_PLACES, int(triton.next_power_of_2(k + k // 8 + SPARE_PLACES)))


def _find_stride(values: torch.Tensor | None) -> int:
    return 0 if values is None or values.shape[0] == 1 else 1
