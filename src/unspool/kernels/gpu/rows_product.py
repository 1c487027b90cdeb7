"""A matrix times a few rows on the tensor cores, with norm, bias, activation and residual like `row_product`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from unspool.kernels.gpu.activations import NONE, activate
from unspool.kernels.gpu.launching import launch_options, let_next_start, wait_for_input

SMALLEST_ROWS = 16  # of a product on the tensor cores


@dataclass(frozen=True, slots=True)
class RowsTiling:
    """How the matrix is cut: rows and columns a program, its warps, and how many cuts are on their way."""

    rows: int
    columns: int
    warps: int
    stages: int


@triton.jit(do_not_specialize=["M"])
def _multiply_rows(
    W, X, NORM, BIAS, Y, eps, M, N,
    K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    ACT: tl.constexpr, IS_GATED: tl.constexpr, ADDS: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * BN
    rm, place, rk = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK)
    rn = first + place
    is_row, is_out = rm < M, rn < N
    at = W + first.to(tl.int64) * K + tl.where(is_out, place, 0)[:, None] * K + rk[None, :]
    beside = at
    if IS_GATED:
        beside = at + N.to(tl.int64) * K
    source = X + rm[:, None] * K + rk[None, :]
    total = tl.zeros((BM, BN), tl.float32)
    other = total
    squares = tl.zeros((BM, BK), tl.float32)
    let_next_start(PDL)
    wait_for_input(PDL)
    for k in tl.range(0, K, BK, num_stages=STAGES):
        if K % BK == 0:
            x = tl.load(source + k, mask=is_row[:, None], other=0.0)
            w = tl.load(at + k, eviction_policy="evict_first")
        else:
            in_range = (rk + k < K)[None, :]
            x = tl.load(source + k, mask=is_row[:, None] & in_range, other=0.0)
            w = tl.load(at + k, mask=in_range, other=0.0, eviction_policy="evict_first")
        if HAS_NORM:
            scale = tl.load(NORM + k + rk, mask=rk + k < K, other=0.0).to(tl.float32)
            wide = x.to(tl.float32)
            squares += wide * wide
            x = (wide * scale[None, :]).to(x.dtype)
        total = tl.dot(x, tl.trans(w), total, input_precision=PRECISION)
        if IS_GATED:
            if K % BK == 0:
                v = tl.load(beside + k, eviction_policy="evict_first")
            else:
                v = tl.load(beside + k, mask=(rk + k < K)[None, :], other=0.0, eviction_policy="evict_first")
            other = tl.dot(x, tl.trans(v), other, input_precision=PRECISION)
    y, z = total, other
    if HAS_NORM:
        root = tl.rsqrt(tl.sum(squares, 1) / K + eps)[:, None]
        y, z = y * root, z * root
    if HAS_BIAS:
        y += tl.load(BIAS + rn, mask=is_out, other=0.0).to(tl.float32)[None, :]
    y = activate(y, ACT)
    if IS_GATED:
        if HAS_BIAS:
            z += tl.load(BIAS + N + rn, mask=is_out, other=0.0).to(tl.float32)[None, :]
        y *= z
    target = Y + rm[:, None].to(tl.int64) * N + rn[None, :]
    is_kept = is_row[:, None] & is_out[None, :]
    if ADDS:
        y += tl.load(target, mask=is_kept, other=0.0).to(tl.float32)
    tl.store(target, y.to(Y.dtype.element_ty), mask=is_kept)


def multiply_rows(
    weight: torch.Tensor,  # (outputs, inputs); gate above value where gated
    x: torch.Tensor,  # (rows, inputs)
    out: torch.Tensor,  # (rows, outputs), half as many where gated; any dtype
    tiling: RowsTiling,
    *,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    bias: torch.Tensor | None = None,
    activation: int = NONE,
    is_gated: bool = False,
    adds: bool = False,
) -> None:
    """What `multiply_row` does, for several rows."""
    outputs, inputs = weight.shape
    outputs = outputs // 2 if is_gated else outputs
    _multiply_rows[(triton.cdiv(outputs, tiling.rows),)](
        weight,
        x,
        norm if norm is not None else x,
        bias if bias is not None else x,
        out,
        eps,
        x.shape[0],
        outputs,
        K=inputs,
        BM=max(SMALLEST_ROWS, triton.next_power_of_2(x.shape[0])),
        BN=tiling.rows,
        BK=min(tiling.columns, max(16, triton.next_power_of_2(inputs))),
        STAGES=tiling.stages,
        ACT=activation,
        IS_GATED=is_gated,
        ADDS=adds,
        HAS_NORM=norm is not None,
        HAS_BIAS=bias is not None,
        PRECISION="ieee",
        num_warps=tiling.warps,
        **launch_options(),
    )
