"""A matrix times one or two rows, with the operations before and after it in a block: norm, bias, activation, residual.

The reference is `F.linear` with `kernels.norms.rms_norm` before it. Reading the matrix is the cost, so a program takes
a few whole rows of it; its first loads are issued before the kernel that computes the input has ended.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Unpack

import torch
import triton
import triton.language as tl

from unspool.kernels.gpu.launching import let_next_start, wait_for_input
from unspool.kernels.gpu.products.result import Around, count_outputs, launch_product, load_held, write_result


@dataclass(frozen=True, slots=True)
class RowTiling:
    """How the matrix is cut: rows and columns per program, its warps, and when it lets the next kernel start."""

    rows: int
    columns: int
    warps: int
    starts_next_early: bool = True


@triton.jit
def _multiply_row(
    W, X, NORM, BIAS, Y, eps, N,
    R: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    ACT: tl.constexpr, IS_GATED: tl.constexpr, ADDS: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr, IS_EVEN: tl.constexpr,
    EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
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
    if EARLY:
        let_next_start(PDL)
    wait_for_input(PDL)
    totals, others, squares, held = (), (), (), ()
    for row in tl.static_range(R):
        held = held + (load_held(Y, row, rn, is_row, N, ADDS),)
        x = tl.load(X + row * K + rk, mask=rk < K, other=0.0).to(tl.float32)
        squares = squares + (x * x,)
        if HAS_NORM:
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
            x = tl.load(X + row * K + k + rk, mask=rk + k < K, other=0.0).to(tl.float32)
            squares = squares + (so_far[2][row] + x * x,)
            if HAS_NORM:
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
            totals[row], others[row], squares[row], held[row], row, rn, is_row, BIAS, Y, eps, N,
            K, ACT, IS_GATED, ADDS, HAS_NORM, HAS_BIAS,
        )  # fmt: skip


def multiply_row(
    weight: torch.Tensor,  # (outputs, inputs)
    x: torch.Tensor,  # (rows, inputs)
    out: torch.Tensor,  # (rows, outputs)
    tiling: RowTiling,
    **around: Unpack[Around],
) -> None:
    """A product and the operations around it."""
    launch_product(
        _multiply_row,
        (weight,),
        weight.shape,
        x,
        out,
        tiling.rows,
        around,
        R=x.shape[0],
        BN=tiling.rows,
        BK=min(tiling.columns, triton.next_power_of_2(weight.shape[1])),
        IS_EVEN=count_outputs(weight.shape, around) % tiling.rows == 0,
        EARLY=tiling.starts_next_early,
        num_warps=tiling.warps,
    )
