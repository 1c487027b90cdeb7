"""What a sampling tail may cut after top-k, top-p and min-p: top-a, typical, epsilon and eta, in this order.

They look at a row's few candidates alone; `slow_tail.draw_slowly` does the same if too many tie.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _sum_up(value, is_kept, highest):
    """Log-sum-exp, entropy and highest of the scores that are kept, relative to `highest`."""
    below = tl.where(is_kept, value - highest, 0.0)
    weight = tl.where(is_kept, tl.exp(below), 0.0).to(tl.float64)
    total = tl.sum(weight, 0)
    whole = tl.log(total)
    entropy = whole - tl.sum(weight * below, 0) / total
    top = tl.max(tl.where(is_kept, below, float("-inf")), 0)
    return whole.to(tl.float32), entropy.to(tl.float32), top


@triton.jit
def cut_candidates(
    VALUES, value, is_kept, num_found, highest, top_a, typical, epsilon, eta,
    HAS_TOP_A: tl.constexpr, HAS_TYPICAL: tl.constexpr, HAS_EPSILON: tl.constexpr, HAS_ETA: tl.constexpr,
    ROOM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Which of a row's candidates, that were kept so far, are kept; VALUES is where they are, and is written."""
    at = tl.arange(0, ROOM)
    if HAS_TOP_A:
        whole, _, _ = _sum_up(value, is_kept, highest)
        is_kept = is_kept & (value - highest >= top_a - whole)
    if HAS_TYPICAL:
        whole, entropy, _ = _sum_up(value, is_kept, highest)
        tl.debug_barrier()
        tl.store(VALUES + at, tl.where(is_kept, value, float("-inf")), mask=at < num_found)
        tl.debug_barrier()
        distance = tl.abs((whole + (highest - value)) - entropy)
        reached = tl.zeros((ROOM,), tl.float64)  # the weight of what is no farther
        for first in range(0, num_found, BLOCK):
            other = first + tl.arange(0, BLOCK)
            its_value = tl.load(VALUES + other, mask=other < num_found, other=float("-inf"))
            its_distance = tl.abs((whole + (highest - its_value)) - entropy)
            its_weight = tl.where(its_value > float("-inf"), tl.exp(its_value - highest), 0.0).to(tl.float64)
            is_near = its_distance[None, :] <= distance[:, None]
            reached += tl.sum(tl.where(is_near, its_weight[None, :], 0.0), 1)
        wanted = typical.to(tl.float64) * tl.exp(whole.to(tl.float64))
        cut = tl.min(tl.where(is_kept & (reached >= wanted), distance, float("inf")), 0)
        is_kept = is_kept & (distance <= cut)
    if HAS_EPSILON:
        whole, _, top = _sum_up(value, is_kept, highest)
        is_kept = is_kept & (value - highest >= tl.minimum(epsilon + whole, top))
    if HAS_ETA:
        whole, entropy, top = _sum_up(value, is_kept, highest)
        floor = tl.minimum(eta, eta / 2.0 - entropy) + whole
        is_kept = is_kept & (value - highest >= tl.minimum(floor, top))
    return is_kept
