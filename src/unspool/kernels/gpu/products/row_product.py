"""A matrix times one or two rows, with the operations before and after it in a block: norm, bias, activation, residual.

The reference is `F.linear` with `kernels.norms` before it. Reading the matrix is the cost, so a program takes a few
whole rows of it. Its first loads are issued before the kernel that computes the input has ended, and more of the matrix
is prefetched then: so memory is read while a small kernel, attention above all, leaves it idle.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Unpack

import torch
import triton
import triton.language as tl

from unspool.kernels.gpu.launching import LINE_BYTES, ask_for, fetch_ahead, let_next_start, wait_for_input
from unspool.kernels.gpu.products.norms import find_moments, scale_centred
from unspool.kernels.gpu.products.result import (
    Around,
    count_outputs,
    launch_product,
    load_biases,
    load_held,
    write_result,
)

ALIGNED: Final = 16  # bytes: of what is fetched ahead
FETCHERS: Final = 132  # programs that fetch ahead: the first ones, which start together


@dataclass(frozen=True, slots=True)
class RowTiling:
    """How the matrix is cut: rows and columns per program, its warps, and when it lets the next kernel start."""

    rows: int
    columns: int
    warps: int
    starts_next_early: bool = True


@triton.jit
def load_input(
    X, NORM, SHIFT, MADE, POST, INTO, eps, post_eps, row, rk,
    K: tl.constexpr, BK: tl.constexpr, IS_LAYER: tl.constexpr, HAS_NORM: tl.constexpr, HAS_SHIFT: tl.constexpr,
    HAS_ADDEND: tl.constexpr,
):  # fmt: skip
    """A row of the input, in parts of BK numbers: with its addend, and after a layer norm."""
    xs = ()
    for k in tl.static_range(0, K, BK):
        xs = xs + (tl.load(X + row * K + k + rk, mask=k + rk < K, other=0.0).to(tl.float32),)
    pivot = 0.0
    if IS_LAYER:
        pivot = tl.load(X + row * K).to(tl.float32)
    if HAS_ADDEND:
        terms = ()
        squares = tl.zeros((BK,), tl.float32)
        for k in tl.static_range(0, K, BK):
            term = tl.load(MADE + row * K + k + rk, mask=k + rk < K, other=0.0).to(tl.float32)
            squares += term * term
            terms = terms + (term,)
        root = tl.rsqrt(tl.sum(squares, 0) / K + post_eps)
        so_far = xs
        xs = ()
        for k in tl.static_range(0, K, BK):
            weight = tl.load(POST + k + rk, mask=k + rk < K, other=0.0).to(tl.float32)
            whole = (so_far[k // BK] + terms[k // BK] * root * weight).to(X.dtype.element_ty)
            if tl.program_id(0) == 0:
                tl.store(INTO + row * K + k + rk, whole, mask=k + rk < K)
            xs = xs + (whole.to(tl.float32),)
    if IS_LAYER:
        sums = tl.zeros((BK,), tl.float32)
        squares = tl.zeros((BK,), tl.float32)
        for k in tl.static_range(0, K, BK):
            less = tl.where(k + rk < K, xs[k // BK] - pivot, 0.0)
            sums += less
            squares += less * less
        mean, root = find_moments(sums, squares, pivot, eps, K)
        so_far = xs
        xs = ()
        for k in tl.static_range(0, K, BK):
            x = scale_centred(so_far[k // BK], mean, root, NORM, SHIFT, k + rk, k + rk < K, HAS_NORM, HAS_SHIFT)
            xs = xs + (x,)
    return xs


@triton.jit
def _multiply_row(
    W, X, NORM, BIAS, Y, eps, N, SHIFT, MADE, POST, INTO, post_eps,
    R: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    ACT: tl.constexpr, IS_GATED: tl.constexpr, ADDS: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr, IS_LAYER: tl.constexpr, HAS_SHIFT: tl.constexpr,
    HAS_ADDEND: tl.constexpr, IS_EVEN: tl.constexpr, AHEAD: tl.constexpr, FETCHERS: tl.constexpr,
    LINE_BYTES: tl.constexpr, LINES: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    HAS_ROOT: tl.constexpr = HAS_NORM and not IS_LAYER
    IS_HELD: tl.constexpr = IS_LAYER or HAS_ADDEND  # the whole input is needed before the first product
    first = tl.program_id(0) * BN
    place, rk = tl.arange(0, BN), tl.arange(0, BK)
    rn = first + place
    is_row = rn < N
    at = W + first.to(tl.int64) * K + place[:, None] * K + rk[None, :]
    if IS_EVEN and BK <= K:
        w = tl.load(at, eviction_policy="evict_first")
    else:
        w = tl.load(at, mask=is_row[:, None] & (rk < K)[None, :], other=0.0, eviction_policy="evict_first")
    if IS_GATED:
        beside = at + N.to(tl.int64) * K
        if IS_EVEN and BK <= K:
            v = tl.load(beside, eviction_policy="evict_first")
        else:
            v = tl.load(beside, mask=is_row[:, None] & (rk < K)[None, :], other=0.0, eviction_policy="evict_first")
    fetch_ahead(W, N.to(tl.int64) * K, AHEAD, FETCHERS, PDL)
    if IS_GATED:
        fetch_ahead(W + N.to(tl.int64) * K, N.to(tl.int64) * K, AHEAD, FETCHERS, PDL)
    LINE: tl.constexpr = LINE_BYTES * 8 // X.dtype.element_ty.primitive_bitwidth  # numbers
    line = tl.arange(0, LINES) * LINE
    if HAS_NORM:
        ask_for(NORM + line, line < K, PDL)
    if HAS_SHIFT:
        ask_for(SHIFT + line, line < K, PDL)
    if HAS_ADDEND:
        ask_for(POST + line, line < K, PDL)
    biases = load_biases(BIAS, rn, is_row, N, IS_GATED, HAS_BIAS)
    if EARLY:
        let_next_start(PDL)
    wait_for_input(PDL)
    totals, others, squares, held, inputs = (), (), (), (), ()
    for row in tl.static_range(R):
        held = held + (load_held(Y, row, rn, is_row, N, ADDS),)
        if IS_HELD:
            xs = load_input(
                X, NORM, SHIFT, MADE, POST, INTO, eps, post_eps, row, rk, K, BK, IS_LAYER, HAS_NORM, HAS_SHIFT,
                HAS_ADDEND,
            )  # fmt: skip
            inputs = inputs + (xs,)
            x = xs[0]
        else:
            x = tl.load(X + row * K + rk, mask=rk < K, other=0.0).to(tl.float32)
        squares = squares + (x * x,)
        if HAS_ROOT:
            x = x * tl.load(NORM + rk, mask=rk < K, other=0.0).to(tl.float32)
        total = w.to(tl.float32) * x[None, :]
        totals = totals + (total,)
        if IS_GATED:
            total = v.to(tl.float32) * x[None, :]
        others = others + (total,)
    for k in tl.static_range(BK, K, BK):
        if IS_EVEN and k + BK <= K:
            w = tl.load(at + k, eviction_policy="evict_first")
        else:
            w = tl.load(at + k, mask=is_row[:, None] & (rk + k < K)[None, :], other=0.0, eviction_policy="evict_first")
        if IS_GATED:
            if IS_EVEN and k + BK <= K:
                v = tl.load(beside + k, eviction_policy="evict_first")
            else:
                v = tl.load(
                    beside + k, mask=is_row[:, None] & (rk + k < K)[None, :], other=0.0, eviction_policy="evict_first"
                )
        so_far = (totals, others, squares)
        totals, others, squares = (), (), ()
        for row in tl.static_range(R):
            if IS_HELD:
                x = inputs[row][k // BK]
            else:
                x = tl.load(X + row * K + k + rk, mask=rk + k < K, other=0.0).to(tl.float32)
            squares = squares + (so_far[2][row] + x * x,)
            if HAS_ROOT:
                x = x * tl.load(NORM + k + rk, mask=rk + k < K, other=0.0).to(tl.float32)
            total = so_far[0][row] + w.to(tl.float32) * x[None, :]
            totals = totals + (total,)
            if IS_GATED:
                total = so_far[1][row] + v.to(tl.float32) * x[None, :]
            others = others + (total,)
    if not EARLY:
        let_next_start(PDL)
    for row in tl.static_range(R):
        write_result(
            totals[row], others[row], squares[row], held[row], biases, row, rn, is_row, Y, eps, N,
            K, ACT, IS_GATED, ADDS, HAS_ROOT,
        )  # fmt: skip


def multiply_row(
    weight: torch.Tensor,  # (outputs, inputs)
    x: torch.Tensor,  # (rows, inputs)
    out: torch.Tensor,  # (rows, outputs)
    tiling: RowTiling,
    *,
    ahead: int = 0,  # bytes of the matrix to fetch while the kernel before still runs
    **around: Unpack[Around],
) -> None:
    """A product and the operations around it."""
    inputs, shift, addend = weight.shape[1], around.get("shift"), around.get("addend")
    launch_product(
        _multiply_row,
        (weight,),
        weight.shape,
        x,
        out,
        tiling.rows,
        around,
        shift if shift is not None else x,
        addend.made if addend is not None else x,
        addend.norm if addend is not None else x,
        addend.into if addend is not None else x,
        addend.eps if addend is not None else 0.0,
        R=x.shape[0],
        BN=tiling.rows,
        BK=min(tiling.columns, triton.next_power_of_2(inputs)),
        IS_LAYER=around.get("centres", False),
        HAS_SHIFT=shift is not None,
        HAS_ADDEND=addend is not None,
        IS_EVEN=count_outputs(weight.shape, around) % tiling.rows == 0,
        AHEAD=share_ahead(weight, ahead, is_gated=around.get("is_gated", False)),
        FETCHERS=FETCHERS,
        LINE_BYTES=LINE_BYTES,
        LINES=triton.next_power_of_2(triton.cdiv(inputs * x.element_size(), LINE_BYTES)),
        EARLY=tiling.starts_next_early,
        num_warps=tiling.warps,
    )


def share_ahead(weight: torch.Tensor, ahead: int, *, is_gated: bool) -> int:
    """The numbers that each of the first programs fetches ahead, of each half of a gated matrix; 0 if it can't."""
    size = weight.element_size()
    if not ahead or weight.data_ptr() % ALIGNED or weight.shape[1] * size % ALIGNED:
        return 0
    each = min(ahead, weight.numel() * size) // (FETCHERS * (2 if is_gated else 1))
    return int(triton.cdiv(each, LINE_BYTES)) * LINE_BYTES // size
