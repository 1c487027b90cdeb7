"""A matrix times one or two rows, with the operations before and after it in a block: norm, bias, activation, residual.

The reference is `F.linear` with `kernels.norms` before it. Reading the matrix is the cost, so a program takes a few
whole rows of it; its first loads are issued before the kernel that computes the input has ended.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Unpack

import torch
import triton
import triton.language as tl

from unspool.kernels.gpu.launching import let_next_start, wait_for_input
from unspool.kernels.gpu.products.norms import find_moments
from unspool.kernels.gpu.products.result import (
    Around,
    count_outputs,
    launch_product,
    load_biases,
    load_held,
    write_result,
)


@dataclass(frozen=True, slots=True)
class RowTiling:
    """How the matrix is cut: rows and columns per program, its warps, and when it lets the next kernel start.

    With fewer registers per thread more programs are there at a time, this kernel's and those of the kernels around it.
    """

    rows: int
    columns: int
    warps: int
    starts_next_early: bool = True
    ahead: int = 1  # how many times so many columns are loaded before the input is there
    registers: int | None = None  # at most so many per thread; None: as the compiler chooses
    cluster: int = 1  # neighbouring programs that are put on multiprocessors of their own, where there are clusters


@triton.jit
def load_tile(at, is_row, rk, k: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, IS_EVEN: tl.constexpr):
    """Columns from k on of a program's rows of the matrix."""
    if IS_EVEN and k + BK <= K:
        w = tl.load(at + k, eviction_policy="evict_first")
    else:
        w = tl.load(at + k, mask=is_row[:, None] & (rk + k < K)[None, :], other=0.0, eviction_policy="evict_first")
    return w


@triton.jit
def load_ahead(
    at, beside, is_row, rk,
    K: tl.constexpr, BK: tl.constexpr, AHEAD: tl.constexpr, IS_GATED: tl.constexpr, IS_EVEN: tl.constexpr,
):  # fmt: skip
    """The first tiles of a program's rows, and of those beside them if the matrix is gated."""
    ws, vs = (), ()
    for k in tl.static_range(0, K, BK):
        if k < AHEAD * BK:
            w = load_tile(at, is_row, rk, k, K, BK, IS_EVEN)
            v = w
            if IS_GATED:
                v = load_tile(beside, is_row, rk, k, K, BK, IS_EVEN)
            ws, vs = ws + (w,), vs + (v,)
    return ws, vs


@triton.jit
def load_weights(
    NORM, SHIFT, POST, rk,
    K: tl.constexpr, BK: tl.constexpr, HAS_NORM: tl.constexpr, HAS_SHIFT: tl.constexpr, HAS_ADDEND: tl.constexpr,
):  # fmt: skip
    """The weights of an input's norms, in parts of BK numbers: no kernel writes them, so they are loaded early."""
    norms, shifts, posts = (), (), ()
    for k in tl.static_range(0, K, BK):
        norm, shift, post = rk, rk, rk
        if HAS_NORM:
            norm = tl.load(NORM + k + rk, mask=k + rk < K, other=0.0)
        if HAS_SHIFT:
            shift = tl.load(SHIFT + k + rk, mask=k + rk < K, other=0.0)
        if HAS_ADDEND:
            post = tl.load(POST + k + rk, mask=k + rk < K, other=0.0)
        norms, shifts, posts = norms + (norm,), shifts + (shift,), posts + (post,)
    return norms, shifts, posts


@triton.jit
def load_input(
    X, MADE, INTO, weights, eps, post_eps, row, rk,
    K: tl.constexpr, BK: tl.constexpr, IS_LAYER: tl.constexpr, HAS_NORM: tl.constexpr, HAS_SHIFT: tl.constexpr,
    HAS_ADDEND: tl.constexpr, KEEPS: tl.constexpr,
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
            term = terms[k // BK] * root * weights[2][k // BK].to(tl.float32)
            whole = (so_far[k // BK] + term).to(X.dtype.element_ty)
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
            x = (so_far[k // BK] - mean) * root
            if HAS_NORM:
                x *= weights[0][k // BK].to(tl.float32)
            if HAS_SHIFT:
                x += weights[1][k // BK].to(tl.float32)
            # As a norm of its own would round it; and threads exchange half as many bytes.
            rounded = x.to(X.dtype.element_ty)
            if KEEPS:
                if tl.program_id(0) == 0:
                    tl.store(INTO + row * K + k + rk, rounded, mask=k + rk < K)
            xs = xs + (rounded.to(tl.float32),)
    return xs


@triton.jit
def _multiply_row(
    W, X, NORM, BIAS, Y, eps, N, SHIFT, MADE, POST, INTO, post_eps,
    R: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    ACT: tl.constexpr, IS_GATED: tl.constexpr, ADDS: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr, IS_LAYER: tl.constexpr, HAS_SHIFT: tl.constexpr,
    HAS_ADDEND: tl.constexpr, KEEPS: tl.constexpr, IS_EVEN: tl.constexpr,
    AHEAD: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    HAS_ROOT: tl.constexpr = HAS_NORM and not IS_LAYER
    IS_HELD: tl.constexpr = IS_LAYER or HAS_ADDEND  # the whole input is needed before the first product
    first = tl.program_id(0) * BN
    place, rk = tl.arange(0, BN), tl.arange(0, BK)
    rn = first + place
    is_row = rn < N
    at = W + first.to(tl.int64) * K + place[:, None] * K + rk[None, :]
    beside = at + N.to(tl.int64) * K  # the gated half
    loaded = load_ahead(at, beside, is_row, rk, K, BK, AHEAD, IS_GATED, IS_EVEN)
    biases = load_biases(BIAS, rn, is_row, N, IS_GATED, HAS_BIAS)
    weights = load_weights(NORM, SHIFT, POST, rk, K, BK, HAS_NORM, HAS_SHIFT, HAS_ADDEND)
    if EARLY:
        let_next_start(PDL)
    wait_for_input(PDL)
    totals, others, squares, held, inputs = (), (), (), (), ()
    for row in tl.static_range(R):
        held = held + (load_held(Y, row, rn, is_row, N, ADDS),)
        nothing = tl.zeros((BN, BK), tl.float32)
        totals, others, squares = totals + (nothing,), others + (nothing,), squares + (tl.zeros((BK,), tl.float32),)
        if IS_HELD:
            xs = load_input(
                X, MADE, INTO, weights, eps, post_eps, row, rk, K, BK, IS_LAYER, HAS_NORM, HAS_SHIFT, HAS_ADDEND, KEEPS
            )
            inputs = inputs + (xs,)
    for k in tl.static_range(0, K, BK):
        if k < AHEAD * BK:
            w, v = loaded[0][k // BK], loaded[1][k // BK]
        else:
            w = load_tile(at, is_row, rk, k, K, BK, IS_EVEN)
            v = w
            if IS_GATED:
                v = load_tile(beside, is_row, rk, k, K, BK, IS_EVEN)
        so_far = (totals, others, squares)
        totals, others, squares = (), (), ()
        for row in tl.static_range(R):
            if IS_HELD:
                x = inputs[row][k // BK]
            else:
                x = tl.load(X + row * K + k + rk, mask=rk + k < K, other=0.0).to(tl.float32)
            squares = squares + (so_far[2][row] + x * x,)
            if HAS_ROOT:
                x = x * weights[0][k // BK].to(tl.float32)
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
    **around: Unpack[Around],
) -> None:
    """A product and the operations around it."""
    shift, addend, kept = around.get("shift"), around.get("addend"), around.get("kept")
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
        addend.into if addend is not None else kept if kept is not None else x,
        addend.eps if addend is not None else 0.0,
        R=x.shape[0],
        BN=tiling.rows,
        BK=min(tiling.columns, triton.next_power_of_2(weight.shape[1])),
        IS_LAYER=around.get("centres", False),
        HAS_SHIFT=shift is not None,
        HAS_ADDEND=addend is not None,
        KEEPS=kept is not None,
        IS_EVEN=count_outputs(weight.shape, around) % tiling.rows == 0,
        AHEAD=tiling.ahead,
        EARLY=tiling.starts_next_early,
        cluster=tiling.cluster,
        num_warps=tiling.warps,
        maxnreg=tiling.registers,
    )
