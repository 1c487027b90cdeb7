"""Norms of a step's rows: inside the kernel that reads them, or in one of their own (reference: `kernels.norms`)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from unspool.kernels.gpu.launching import launch, launch_options, let_next_start, wait_for_input
from unspool.kernels.gpu.products.arranging import GROUP
from unspool.kernels.gpu.products.word_parts import arrange_row


@triton.jit
def _add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def find_moments(sums, squares, pivot, eps, K):
    """The mean of K numbers and the inverse of their deviation, from what they and their squares add up to.

    The numbers are taken less a pivot, any one of them: then no mean is so large that squares cancel out, because a
    number of K is at most sqrt(K) deviations away from their mean.
    """
    total, square = tl.reduce((sums, squares), 0, _add_pairs)
    apart = total / K
    return pivot + apart, tl.rsqrt(tl.maximum(square / K - apart * apart, 0.0) + eps)


@triton.jit
def load_norm(WEIGHT, SHIFT, at, is_there, HAS_WEIGHT: tl.constexpr, HAS_SHIFT: tl.constexpr):
    """A norm's weights and shifts for `norm_row`: no kernel writes them, so they may be loaded before its input."""
    weight, shift = 1.0, 0.0
    if HAS_WEIGHT:
        weight = tl.load(WEIGHT + at, mask=is_there, other=0.0)
    if HAS_SHIFT:
        shift = tl.load(SHIFT + at, mask=is_there, other=0.0)
    return weight, shift


@triton.jit
def norm_row(
    x, pivot, weight, shift, is_there, eps, K,
    IS_LAYER: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_SHIFT: tl.constexpr,
):  # fmt: skip
    """A whole row (padded with zeros) after its norm."""
    if IS_LAYER:
        less = tl.where(is_there, x - pivot, 0.0)
        mean, root = find_moments(less, less * less, pivot, eps, K)
        x = (x - mean) * root
    else:
        x *= tl.rsqrt(tl.sum(x * x, 0) / K + eps)
    if HAS_WEIGHT:
        x *= weight.to(tl.float32)
    if HAS_SHIFT:
        x += shift.to(tl.float32)
    return x


@triton.jit
def _normalise(
    X, WEIGHT, SHIFT, OUT, eps, N,
    BLOCK: tl.constexpr, IS_LAYER: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_SHIFT: tl.constexpr,
    ADDS: tl.constexpr, ORDER: tl.constexpr, IS_WHOLE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * N
    at = tl.arange(0, BLOCK)
    weight, shift = load_norm(WEIGHT, SHIFT, at, at < N, HAS_WEIGHT, HAS_SHIFT)
    let_next_start(PDL)
    wait_for_input(PDL)
    x = tl.load(X + row + at, mask=at < N, other=0.0).to(tl.float32)
    pivot = 0.0
    if IS_LAYER:
        pivot = tl.load(X + row).to(tl.float32)
    y = norm_row(x, pivot, weight, shift, at < N, eps, N, IS_LAYER, HAS_WEIGHT, HAS_SHIFT)
    if ADDS:
        y += tl.load(OUT + row + at, mask=at < N, other=0.0).to(tl.float32)
    y, place = arrange_row(y.to(OUT.dtype.element_ty), at, N, BLOCK, ORDER, IS_WHOLE)
    tl.store(OUT + row + place, y, mask=at < N)


def normalise(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    out: torch.Tensor,
    *,
    adds: bool = False,
    centres: bool = False,
    shift: torch.Tensor | None = None,
    order: int = 0,
) -> None:
    """out = norm(x), or out += norm(x) if a block normalises what it adds: (rows, hidden).

    A norm of root mean squares, or a layer norm (`centres`) with or without a weight and a shift. With an `order` of 4
    or 8 bits `out` is arranged (`arranging`).
    """
    assert not (adds and order), "nothing is added to arranged rows"
    rows, width = x.shape
    block = triton.next_power_of_2(width)
    launch(
        _normalise,
        (rows,),
        x,
        weight if weight is not None else x,
        shift if shift is not None else x,
        out,
        eps,
        width,
        BLOCK=block,
        IS_LAYER=centres,
        HAS_WEIGHT=weight is not None,
        HAS_SHIFT=shift is not None,
        ADDS=adds,
        ORDER=order,
        IS_WHOLE=order > 0 and width % GROUP == 0,
        num_warps=8 if block >= 2048 else 4,
        **launch_options(),
    )
