"""A matrix times one row or two, with what stands before and after it in a block: norm, bias, activation, residual.

The reference is `F.linear` with `kernels.norms.rms_norm` before it. The work is reading the matrix, so a program takes
a few of its rows whole; what it reads first is on its way before the kernel that makes the input has ended.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from unspool.kernels.gpu.activations import NONE
from unspool.kernels.gpu.launching import launch, launch_options, let_next_start, wait_for_input
from unspool.kernels.gpu.result import write_result


@dataclass(frozen=True, slots=True)
class RowTiling:
    """How the matrix is cut: rows and columns a program, its warps, and when it lets the next kernel start."""

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
    totals, others, squares = (), (), ()
    for row in tl.static_range(R):
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
            totals[row], others[row], squares[row], row, rn, is_row, BIAS, Y, eps, N,
            K, ACT, IS_GATED, ADDS, HAS_NORM, HAS_BIAS,
        )  # fmt: skip


def multiply_row(
    weight: torch.Tensor,  # (outputs, inputs); gate above value where gated
    x: torch.Tensor,  # (rows, inputs)
    out: torch.Tensor,  # (rows, outputs), half as many where gated; any dtype
    tiling: RowTiling,
    *,
    norm: torch.Tensor | None = None,  # x is normalised by its root mean square and scaled by this first
    eps: float = 0.0,
    bias: torch.Tensor | None = None,
    activation: int = NONE,
    is_gated: bool = False,
    adds: bool = False,  # into what `out` holds already
) -> None:
    """out = activation(weight @ norm(x) + bias), times the gated half, plus what was there."""
    outputs, inputs = weight.shape
    outputs = outputs // 2 if is_gated else outputs
    launch(
        _multiply_row,
        (triton.cdiv(outputs, tiling.rows),),
        weight,
        x,
        norm if norm is not None else x,
        bias if bias is not None else x,
        out,
        eps,
        outputs,
        R=x.shape[0],
        K=inputs,
        BN=tiling.rows,
        BK=min(tiling.columns, triton.next_power_of_2(inputs)),
        ACT=activation,
        IS_GATED=is_gated,
        ADDS=adds,
        HAS_NORM=norm is not None,
        HAS_BIAS=bias is not None,
        IS_EVEN=outputs % tiling.rows == 0,
        EARLY=tiling.starts_next_early,
        num_warps=tiling.warps,
        **launch_options(),
    )
