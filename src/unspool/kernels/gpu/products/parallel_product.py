"""The products of a block whose attention and feed-forward read the same state, two at a time and for one row.

`multiply_twins` reads the state once for QKV and for the feed-forward's first matrix; `multiply_sum` adds what both
branches give to the state. The references are two calls of `row_product.multiply_row` each.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from unspool.kernels.gpu.launching import launch, launch_options, let_next_start, wait_for_input
from unspool.kernels.gpu.products.activations import NONE, activate
from unspool.kernels.gpu.products.row_product import RowTiling, load_ahead, load_input, load_tile, load_weights


@dataclass(frozen=True, slots=True)
class Branch:
    """One of two products: out = activation(weight @ norm(x) + bias)."""

    weight: torch.Tensor  # (outputs, inputs)
    bias: torch.Tensor | None
    norm: torch.Tensor | None = None
    shift: torch.Tensor | None = None
    activation: int = NONE


@triton.jit
def _multiply_twins(
    X, W, NORM, SHIFT, BIAS, Y, N, W2, NORM2, SHIFT2, BIAS2, Y2, N2, eps, num_first,
    K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, ACT: tl.constexpr,
    HAS_NORM: tl.constexpr, IS_LAYER: tl.constexpr, HAS_SHIFT: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_BIAS2: tl.constexpr, IS_EVEN: tl.constexpr, AHEAD: tl.constexpr,
    EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    is_second = program >= num_first
    first = tl.where(is_second, program - num_first, program) * BN
    n = tl.where(is_second, N2, N)
    place, rk = tl.arange(0, BN), tl.arange(0, BK)
    rn = first + place
    is_row = rn < n
    at = tl.where(is_second, W2, W) + first.to(tl.int64) * K + place[:, None] * K + rk[None, :]
    loaded = load_ahead(at, at, is_row, rk, K, BK, AHEAD, False, IS_EVEN)
    bias = tl.zeros((BN,), tl.float32)
    if HAS_BIAS:
        bias += tl.load(BIAS + rn, mask=is_row & (program < num_first), other=0.0).to(tl.float32)
    if HAS_BIAS2:
        bias += tl.load(BIAS2 + rn, mask=is_row & is_second, other=0.0).to(tl.float32)
    norms, shifts = tl.where(is_second, NORM2, NORM), tl.where(is_second, SHIFT2, SHIFT)
    weights = load_weights(norms, shifts, X, rk, K, BK, HAS_NORM, HAS_SHIFT, False)
    if EARLY:
        let_next_start(PDL)
    wait_for_input(PDL)
    xs = load_input(X, X, X, weights, eps, 0.0, 0, rk, K, BK, IS_LAYER, HAS_NORM, HAS_SHIFT, False, False)
    total = tl.zeros((BN, BK), tl.float32)
    squares = tl.zeros((BK,), tl.float32)
    for k in tl.static_range(0, K, BK):
        if k < AHEAD * BK:
            w = loaded[0][k // BK]
        else:
            w = load_tile(at, is_row, rk, k, K, BK, IS_EVEN)
        x = xs[k // BK]
        if HAS_NORM and not IS_LAYER:
            squares += x * x
            x = x * weights[0][k // BK].to(tl.float32)
        total += w.to(tl.float32) * x[None, :]
    if not EARLY:
        let_next_start(PDL)
    y = tl.sum(total, 1)
    if HAS_NORM and not IS_LAYER:
        y *= tl.rsqrt(tl.sum(squares, 0) / K + eps)
    y += bias
    y = tl.where(is_second, activate(y, ACT), y)
    tl.store(tl.where(is_second, Y2, Y) + rn, y.to(Y.dtype.element_ty), mask=is_row)


def multiply_twins(
    x: torch.Tensor,  # (1, inputs)
    first: Branch,  # without an activation
    second: Branch,
    outs: tuple[torch.Tensor, torch.Tensor],  # (1, outputs) each
    tiling: RowTiling,
    *,
    eps: float = 0.0,
    centres: bool = False,  # both norms are layer norms
) -> None:
    """Two products of one state, each with its own norm of one kind."""
    inputs = first.weight.shape[1]
    num_first = triton.cdiv(first.weight.shape[0], tiling.rows)
    arguments: list[torch.Tensor | int] = []
    for branch, out in zip((first, second), outs, strict=True):
        for part in (branch.weight, branch.norm, branch.shift, branch.bias, out):
            arguments.append(part if part is not None else x)
        arguments.append(branch.weight.shape[0])
    launch(
        _multiply_twins,
        (num_first + triton.cdiv(second.weight.shape[0], tiling.rows),),
        x,
        *arguments,
        eps,
        num_first,
        K=inputs,
        BN=tiling.rows,
        BK=min(tiling.columns, triton.next_power_of_2(inputs)),
        ACT=second.activation,
        HAS_NORM=first.norm is not None,
        IS_LAYER=centres,
        HAS_SHIFT=first.shift is not None,
        HAS_BIAS=first.bias is not None,
        HAS_BIAS2=second.bias is not None,
        IS_EVEN=first.weight.shape[0] % tiling.rows == 0 and second.weight.shape[0] % tiling.rows == 0,
        AHEAD=tiling.ahead,
        EARLY=tiling.starts_next_early,
        num_warps=tiling.warps,
        maxnreg=tiling.registers,
        **launch_options(),
    )


@triton.jit
def _multiply_sum(
    W, X, BIAS, W2, X2, BIAS2, Y, N,
    K: tl.constexpr, K2: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_BIAS2: tl.constexpr, IS_EVEN: tl.constexpr, AHEAD: tl.constexpr,
    EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * BN
    place, rk = tl.arange(0, BN), tl.arange(0, BK)
    rn = first + place
    is_row = rn < N
    at = W + first.to(tl.int64) * K + place[:, None] * K + rk[None, :]
    loaded = load_ahead(at, at, is_row, rk, K, BK, AHEAD, False, IS_EVEN)
    AHEAD2: tl.constexpr = AHEAD - (K + BK - 1) // BK  # of the second matrix, once all of the first is there
    loaded2 = loaded
    if AHEAD2 > 0:
        at2 = W2 + first.to(tl.int64) * K2 + place[:, None] * K2 + rk[None, :]
        loaded2 = load_ahead(at2, at2, is_row, rk, K2, BK, AHEAD2, False, IS_EVEN)
    bias = tl.zeros((BN,), tl.float32)
    if HAS_BIAS:
        bias += tl.load(BIAS + rn, mask=is_row, other=0.0).to(tl.float32)
    if HAS_BIAS2:
        bias += tl.load(BIAS2 + rn, mask=is_row, other=0.0).to(tl.float32)
    if EARLY:
        let_next_start(PDL)
    wait_for_input(PDL)
    held = tl.load(Y + rn, mask=is_row, other=0.0).to(tl.float32)
    total = tl.zeros((BN, BK), tl.float32)
    for k in tl.static_range(0, K, BK):
        if k < AHEAD * BK:
            w = loaded[0][k // BK]
        else:
            w = load_tile(at, is_row, rk, k, K, BK, IS_EVEN)
        total += w.to(tl.float32) * tl.load(X + k + rk, mask=rk + k < K, other=0.0).to(tl.float32)[None, :]
    at = W2 + first.to(tl.int64) * K2 + place[:, None] * K2 + rk[None, :]
    for k in tl.static_range(0, K2, BK):
        if k < AHEAD2 * BK:
            w = loaded2[0][k // BK]
        else:
            w = load_tile(at, is_row, rk, k, K2, BK, IS_EVEN)
        total += w.to(tl.float32) * tl.load(X2 + k + rk, mask=rk + k < K2, other=0.0).to(tl.float32)[None, :]
    if not EARLY:
        let_next_start(PDL)
    tl.store(Y + rn, (tl.sum(total, 1) + bias + held).to(Y.dtype.element_ty), mask=is_row)


def multiply_sum(
    first: Branch,  # without norms and activations
    x: torch.Tensor,  # (1, inputs of the first)
    second: Branch,
    y: torch.Tensor,  # (1, inputs of the second)
    out: torch.Tensor,  # (1, outputs): added to
    tiling: RowTiling,
) -> None:
    """out += first.weight @ x + second.weight @ y, with their biases."""
    outputs, inputs = first.weight.shape
    launch(
        _multiply_sum,
        (triton.cdiv(outputs, tiling.rows),),
        first.weight,
        x,
        first.bias if first.bias is not None else x,
        second.weight,
        y,
        second.bias if second.bias is not None else x,
        out,
        outputs,
        K=inputs,
        K2=second.weight.shape[1],
        BN=tiling.rows,
        BK=min(tiling.columns, triton.next_power_of_2(inputs)),
        HAS_BIAS=first.bias is not None,
        HAS_BIAS2=second.bias is not None,
        IS_EVEN=outputs % tiling.rows == 0,
        AHEAD=tiling.ahead,
        EARLY=tiling.starts_next_early,
        num_warps=tiling.warps,
        maxnreg=tiling.registers,
        **launch_options(),
    )
