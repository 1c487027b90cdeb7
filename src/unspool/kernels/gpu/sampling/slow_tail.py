"""A sampling tail by passes over a row's groups of scores, for rows of which too many tie to rank them."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def temper(scores, temperature, IS_TEMPERED: tl.constexpr):
    """Scores divided by the temperature, rounded as torch rounds them; infinity if that is NaN."""
    if IS_TEMPERED:
        scores = tl.div_rn(scores, tl.zeros_like(scores) + temperature)
        scores = tl.where(scores == scores, scores, float("inf"))
    return scores


@triton.jit
def _order(value):
    """An integer with the same order as a float."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _unorder(order):
    bits = order.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def load_scores(
    SCORES, GROUPS, V, G, num_chosen, temperature, strip, column, RUN: tl.constexpr, IS_TEMPERED: tl.constexpr
):
    """Scores of the chosen groups, in ascending order of tokens by strip, then by column."""
    is_there = column < num_chosen * RUN
    group = tl.load(GROUPS + column // RUN, mask=is_there, other=0)
    token = strip * (G * RUN) + group * RUN + column % RUN
    is_there = is_there & (token < V)
    value = temper(tl.load(SCORES + token, mask=is_there, other=float("-inf")), temperature, IS_TEMPERED)
    return tl.where(is_there, value, float("-inf")), token


@triton.jit
def _weigh(
    SCORES, GROUPS, V, G, num_chosen, temperature, highest, least,
    STRIPS: tl.constexpr, RUN: tl.constexpr, COLUMNS: tl.constexpr, IS_TEMPERED: tl.constexpr,
):  # fmt: skip
    """The number of a row's scores that are at least `least`, and the sum of their weights; the highest weighs one."""
    counts = tl.zeros((COLUMNS,), tl.int32)
    weights = tl.zeros((COLUMNS,), tl.float64)
    for strip in range(STRIPS):
        for first in range(0, num_chosen * RUN, COLUMNS):
            column = first + tl.arange(0, COLUMNS)
            value, _ = load_scores(SCORES, GROUPS, V, G, num_chosen, temperature, strip, column, RUN, IS_TEMPERED)
            is_in = (value >= least) & (value > float("-inf"))
            counts += is_in.to(tl.int32)
            weights += tl.where(is_in, tl.exp(value - highest), 0.0).to(tl.float64)
    return tl.sum(counts, 0), tl.sum(weights, 0)


@triton.jit
def _find_cut(
    SCORES, GROUPS, V, G, num_chosen, temperature, highest, low, least_count, least_weight,
    STRIPS: tl.constexpr, RUN: tl.constexpr, COLUMNS: tl.constexpr, IS_TEMPERED: tl.constexpr,
):  # fmt: skip
    """The highest number, at least `low`, that enough scores of enough weight reach (in `_order`)."""
    high = _order(highest) + 1
    while high - low > 1:
        middle = low + (high - low) // 2
        count, weight = _weigh(
            SCORES, GROUPS, V, G, num_chosen, temperature, highest, _unorder(middle),
            STRIPS, RUN, COLUMNS, IS_TEMPERED,
        )  # fmt: skip
        is_enough = (count >= least_count) & (weight >= least_weight)
        low = tl.where(is_enough, middle, low)
        high = tl.where(is_enough, high, middle)
    return low


@triton.jit
def _sum_kept(
    SCORES, GROUPS, V, G, num_chosen, temperature, highest, cut, num_equal, floor, center, limit,
    STRIPS: tl.constexpr, RUN: tl.constexpr, COLUMNS: tl.constexpr, IS_TEMPERED: tl.constexpr,
):  # fmt: skip
    """Log-sum-exp, entropy and highest, relative to the highest of all, of a row's scores that are kept: those above
    `cut` and `num_equal` of those at it, if they are at least `floor` and within `limit` of a center."""
    weights, products = tl.zeros((COLUMNS,), tl.float64), tl.zeros((COLUMNS,), tl.float64)
    tops = tl.full((COLUMNS,), float("-inf"), tl.float32)
    for strip in range(STRIPS):
        for first in range(0, num_chosen * RUN, COLUMNS):
            column = first + tl.arange(0, COLUMNS)
            value, _ = load_scores(SCORES, GROUPS, V, G, num_chosen, temperature, strip, column, RUN, IS_TEMPERED)
            below = value - highest
            is_in = (value > cut) & (value >= floor) & (tl.abs(center - below) <= limit)
            weight = tl.where(is_in, tl.exp(below), 0.0).to(tl.float64)
            weights += weight
            products += weight * tl.where(is_in, below, 0.0)
            tops = tl.maximum(tops, tl.where(is_in, below, float("-inf")))
    below = cut - highest
    is_in = (cut >= floor) & (cut > float("-inf")) & (num_equal > 0) & (tl.abs(center - below) <= limit)
    weight = tl.where(is_in, tl.exp(below) * num_equal, 0.0).to(tl.float64)
    total = tl.sum(weights, 0) + weight
    product = tl.sum(products, 0) + weight * tl.where(is_in, below, 0.0)
    whole = tl.log(total)
    top = tl.maximum(tl.max(tops, 0), tl.where(is_in, below, float("-inf")))
    return whole.to(tl.float32), (whole - product / total).to(tl.float32), top


@triton.jit
def draw_slowly(
    SCORES, GROUPS, V, G, num_chosen, temperature, highest, bound, k, top_p, fewest, floor, uniform,
    top_a, typical, epsilon, eta,
    STRIPS: tl.constexpr, RUN: tl.constexpr, COLUMNS: tl.constexpr, IS_TEMPERED: tl.constexpr,
    HAS_TOP_P: tl.constexpr, HAS_AFTER: tl.constexpr, HAS_TOP_A: tl.constexpr, HAS_TYPICAL: tl.constexpr,
    HAS_EPSILON: tl.constexpr, HAS_ETA: tl.constexpr,
):  # fmt: skip
    """A row's token by passes over the chosen groups: bisection finds the thresholds, the first of ties are kept."""
    low = _find_cut(
        SCORES, GROUPS, V, G, num_chosen, temperature, highest, _order(bound), k, 0.0,
        STRIPS, RUN, COLUMNS, IS_TEMPERED,
    )  # fmt: skip
    cut = _unorder(low)  # scores below it are removed, and of equal ones all but the first `num_ties`
    num_ties = tl.zeros((), tl.int32) + V
    if HAS_TOP_P:
        if top_p <= 1.0:
            _, whole = _weigh(
                SCORES, GROUPS, V, G, num_chosen, temperature, highest, cut, STRIPS, RUN, COLUMNS, IS_TEMPERED
            )
            wanted = top_p * whole
            low = _find_cut(
                SCORES, GROUPS, V, G, num_chosen, temperature, highest, low, fewest, wanted,
                STRIPS, RUN, COLUMNS, IS_TEMPERED,
            )  # fmt: skip
            cut = _unorder(low)
            num_above, above = _weigh(
                SCORES, GROUPS, V, G, num_chosen, temperature, highest, _unorder(low + 1),
                STRIPS, RUN, COLUMNS, IS_TEMPERED,
            )  # fmt: skip
            num_needed = tl.ceil((wanted - above) / tl.exp(cut - highest).to(tl.float64))
            num_needed = tl.where(wanted > above, num_needed, 0.0).to(tl.int32)
            num_ties = tl.maximum(num_needed, fewest - num_above)
    center, limit = 0.0, float("inf")
    if HAS_AFTER:
        num_reaching, _ = _weigh(
            SCORES, GROUPS, V, G, num_chosen, temperature, highest, cut, STRIPS, RUN, COLUMNS, IS_TEMPERED
        )
        num_above, _ = _weigh(
            SCORES, GROUPS, V, G, num_chosen, temperature, highest, _unorder(low + 1),
            STRIPS, RUN, COLUMNS, IS_TEMPERED,
        )  # fmt: skip
        num_equal = tl.minimum(num_ties, num_reaching - num_above)
        if HAS_TOP_A:
            whole, _, _ = _sum_kept(
                SCORES, GROUPS, V, G, num_chosen, temperature, highest, cut, num_equal, floor, center, limit,
                STRIPS, RUN, COLUMNS, IS_TEMPERED,
            )  # fmt: skip
            floor = tl.maximum(floor, highest + (top_a - whole))
        if HAS_TYPICAL:
            whole, entropy, _ = _sum_kept(
                SCORES, GROUPS, V, G, num_chosen, temperature, highest, cut, num_equal, floor, center, limit,
                STRIPS, RUN, COLUMNS, IS_TEMPERED,
            )  # fmt: skip
            center = whole - entropy
            wanted = typical.to(tl.float64) * tl.exp(whole.to(tl.float64))
            # Distances are at least 0: their bits have their order.
            least, most = tl.full((), -1, tl.int32), tl.full((), 0x7F800000, tl.int32)
            while most - least > 1:
                middle = least + (most - least) // 2
                reached, _, _ = _sum_kept(
                    SCORES, GROUPS, V, G, num_chosen, temperature, highest, cut, num_equal, floor, center,
                    middle.to(tl.float32, bitcast=True), STRIPS, RUN, COLUMNS, IS_TEMPERED,
                )  # fmt: skip
                is_enough = tl.exp(reached.to(tl.float64)) >= wanted
                most = tl.where(is_enough, middle, most)
                least = tl.where(is_enough, least, middle)
            limit = most.to(tl.float32, bitcast=True)
        if HAS_EPSILON:
            whole, _, top = _sum_kept(
                SCORES, GROUPS, V, G, num_chosen, temperature, highest, cut, num_equal, floor, center, limit,
                STRIPS, RUN, COLUMNS, IS_TEMPERED,
            )  # fmt: skip
            floor = tl.maximum(floor, highest + tl.minimum(epsilon + whole, top))
        if HAS_ETA:
            whole, entropy, top = _sum_kept(
                SCORES, GROUPS, V, G, num_chosen, temperature, highest, cut, num_equal, floor, center, limit,
                STRIPS, RUN, COLUMNS, IS_TEMPERED,
            )  # fmt: skip
            floor = tl.maximum(floor, highest + tl.minimum(tl.minimum(eta, eta / 2.0 - entropy) + whole, top))
    total = tl.zeros((), tl.float64)
    chosen = tl.full((), -1, tl.int64)
    is_open = tl.full((), 1, tl.int32)
    for turn in range(2):  # the first iteration only computes the total
        target = uniform * total
        reached = tl.zeros((), tl.float64)
        num_before = tl.zeros((), tl.int32)
        for strip in range(STRIPS):
            for first in range(0, num_chosen * RUN, COLUMNS):
                column = first + tl.arange(0, COLUMNS)
                value, token = load_scores(
                    SCORES, GROUPS, V, G, num_chosen, temperature, strip, column, RUN, IS_TEMPERED
                )
                is_tie = (value == cut).to(tl.int32)
                is_kept = (value > cut) | ((is_tie > 0) & (num_before + tl.cumsum(is_tie, 0) <= num_ties))
                is_kept = is_kept & (value >= floor) & (value > float("-inf"))
                if HAS_TYPICAL:
                    is_kept = is_kept & (tl.abs(center + (highest - value)) <= limit)
                share = tl.where(is_kept, tl.exp(value.to(tl.float64) - highest.to(tl.float64)), 0.0)
                passed = reached + tl.cumsum(share, 0)
                drawn = tl.min(tl.where((share > 0.0) & (passed > target), token, V), 0)
                last = tl.max(tl.where(share > 0.0, token, -1), 0)  # in case rounding lets none pass
                if (turn == 1) & (is_open > 0):
                    chosen = tl.where(drawn < V, drawn, tl.where(last >= 0, last, chosen)).to(tl.int64)
                    is_open = tl.where(drawn < V, 0, 1)
                num_before += tl.sum(is_tie, 0)
                reached += tl.sum(share, 0)
        total = reached
    return chosen
