"""A matrix times one row after a norm, with what follows it: bias, activation and gate.

The reference is `F.linear` after `kernels.norms`. A warp has whole rows of the matrix and the whole input:
sums stay inside warps, and no thread waits for another. Once the input is there little is left to do, and of that time
barriers take a third in `row_product`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl

from unspool.kernels.gpu.launching import launch, launch_options, let_next_start, wait_for_input
from unspool.kernels.gpu.products.activations import NONE, activate
from unspool.kernels.gpu.products.result import load_biases

COLUMNS = tl.constexpr(256)  # that a warp loads at a time, 16 bytes per thread


@dataclass(frozen=True, slots=True)
class WarpTiling:
    """How the matrix is cut: rows per warp, and warps per program."""

    rows: int
    warps: int


# (outputs, inputs): where it was faster than `row_product` in whole steps of BART-large on an H200, 2026-11-16
_MEASURED: Final[dict[tuple[int, int], WarpTiling]] = {
    (4096, 1024): WarpTiling(4, 4),
}
# The same after norms of root mean squares, both halves of a gated matrix counted: Qwen3-0.6B, 2026-11-17
_MEASURED_OF_ROOTS: Final[dict[tuple[int, int], WarpTiling]] = {(6144, 1024): WarpTiling(4, 4)}


def choose_warp_tiling(weight: torch.Tensor, *, centres: bool) -> WarpTiling | None:
    """The tiling for a matrix after a norm of one row; None if `row_product` is used."""
    measured = _MEASURED if centres else _MEASURED_OF_ROOTS
    return None if weight.dtype == torch.float32 else measured.get((weight.shape[0], weight.shape[1]))


@triton.jit
def _load_rows(at, is_row, rk, k: tl.constexpr, K: tl.constexpr, IS_EVEN: tl.constexpr):
    """Columns from k on of a row of the matrix per warp."""
    if IS_EVEN and k + COLUMNS <= K:
        w = tl.load(at + k, eviction_policy="evict_first")
    else:
        w = tl.load(at + k, mask=is_row[:, None] & (rk + k < K)[None, :], other=0.0, eviction_policy="evict_first")
    return w


@triton.jit
def _load_matrix(
    W, first, rk, N, K: tl.constexpr, EACH: tl.constexpr, IS_EVEN: tl.constexpr, IS_THERE: tl.constexpr
):  # fmt: skip
    """EACH rows of the matrix per warp, from `first` on, in parts (warps, COLUMNS)."""
    ws = ()
    for each in tl.static_range(EACH):
        at = W + (first + each).to(tl.int64)[:, None] * K + rk[None, :]
        parts = ()
        for k in tl.static_range(0, K, COLUMNS):
            w = rk
            if IS_THERE:
                w = _load_rows(at, first + each < N, rk, k, K, IS_EVEN)
            parts = parts + (w,)
        ws = ws + (parts,)
    return ws


@triton.jit
def _load_row(X, every, rk, K: tl.constexpr, IS_THERE: tl.constexpr):
    """A row in parts (warps, COLUMNS), of which every warp has all."""
    xs = ()
    for k in tl.static_range(0, K, COLUMNS):
        x = every
        if IS_THERE:
            x = tl.load(X + every + (rk + k)[None, :], mask=(every == 0) & (rk + k < K)[None, :], other=0.0)
        xs = xs + (x,)
    return xs


@triton.jit
def _normalise(
    xs, norms, shifts, pivot, KEPT, eps, warp, every, rk,
    K: tl.constexpr, WARPS: tl.constexpr, HAS_NORM: tl.constexpr, HAS_SHIFT: tl.constexpr, KEEPS: tl.constexpr,
):  # fmt: skip
    """A row after its layer norm, in parts; program 0 writes it to `KEPT`."""
    sums, squares = tl.zeros((WARPS, COLUMNS), tl.float32), tl.zeros((WARPS, COLUMNS), tl.float32)
    for k in tl.static_range(0, K, COLUMNS):
        less = tl.where((rk + k < K)[None, :], xs[k // COLUMNS].to(tl.float32) - pivot, 0.0)
        sums += less
        squares += less * less
    apart = tl.sum(sums, 1)[:, None] / K
    root = tl.rsqrt(tl.maximum(tl.sum(squares, 1)[:, None] / K - apart * apart, 0.0) + eps)
    given = ()
    for k in tl.static_range(0, K, COLUMNS):
        x = (xs[k // COLUMNS].to(tl.float32) - (pivot + apart)) * root
        if HAS_NORM:
            x *= norms[k // COLUMNS].to(tl.float32)
        if HAS_SHIFT:
            x += shifts[k // COLUMNS].to(tl.float32)
        if KEEPS:
            rounded = x.to(KEPT.dtype.element_ty)
            if tl.program_id(0) == 0:
                is_own = (warp == k // COLUMNS % WARPS)[:, None]  # the warps share the work
                tl.store(KEPT + every + (rk + k)[None, :], rounded, mask=is_own & (rk + k < K)[None, :])
            x = rounded.to(tl.float32)
        given = given + (x,)
    return given


@triton.jit
def _weigh(xs, norms, eps, K: tl.constexpr, WARPS: tl.constexpr, HAS_NORM: tl.constexpr):
    """A row times its norm's weights, in parts, and the inverse of its root mean square, for the sums of products."""
    squares = tl.zeros((WARPS, COLUMNS), tl.float32)
    given = ()
    for k in tl.static_range(0, K, COLUMNS):
        x = xs[k // COLUMNS].to(tl.float32)
        squares += x * x
        if HAS_NORM:
            x *= norms[k // COLUMNS].to(tl.float32)
        given = given + (x,)
    return given, tl.rsqrt(tl.sum(squares, 1)[:, None] / K + eps)


@triton.jit
def _sum_products(
    ws, given, K: tl.constexpr, WARPS: tl.constexpr, EACH: tl.constexpr, IS_THERE: tl.constexpr
):  # fmt: skip
    """The products of a warp's rows of the matrix and the input: (warps, EACH)."""
    slot = tl.arange(0, EACH)[None, :]
    y = tl.zeros((WARPS, EACH), tl.float32)
    if IS_THERE:
        for each in tl.static_range(EACH):
            total = tl.zeros((WARPS, COLUMNS), tl.float32)
            for k in tl.static_range(0, K, COLUMNS):
                total += ws[each][k // COLUMNS].to(tl.float32) * given[k // COLUMNS]
            y = tl.where(slot == each, tl.sum(total, 1)[:, None], y)
    return y


@triton.jit
def _multiply_normed(
    W, X, NORM, SHIFT, BIAS, Y, KEPT, eps, N,
    K: tl.constexpr, WARPS: tl.constexpr, EACH: tl.constexpr, ACT: tl.constexpr, IS_GATED: tl.constexpr,
    IS_LAYER: tl.constexpr, HAS_NORM: tl.constexpr, HAS_SHIFT: tl.constexpr, HAS_BIAS: tl.constexpr,
    KEEPS: tl.constexpr, IS_EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    warp, rk = tl.arange(0, WARPS), tl.arange(0, COLUMNS)
    first = (tl.program_id(0) * WARPS + warp) * EACH
    every = tl.zeros((WARPS, 1), tl.int32)
    ws = _load_matrix(W, first, rk, N, K, EACH, IS_EVEN, True)
    vs = _load_matrix(W + N.to(tl.int64) * K, first, rk, N, K, EACH, IS_EVEN, IS_GATED)  # the gated half
    outputs = first[:, None] + tl.arange(0, EACH)[None, :]
    biases = load_biases(BIAS, outputs, outputs < N, N, IS_GATED, HAS_BIAS)
    norms, shifts = _load_row(NORM, every, rk, K, HAS_NORM), _load_row(SHIFT, every, rk, K, HAS_SHIFT)
    let_next_start(PDL)
    wait_for_input(PDL)
    xs = _load_row(X, every, rk, K, True)  # all loads before the first use
    root = 1.0
    if IS_LAYER:
        pivot = tl.load(X).to(tl.float32)  # any number of the row: see `norms.find_moments`
        given = _normalise(
            xs, norms, shifts, pivot, KEPT, eps, warp, every, rk, K, WARPS, HAS_NORM, HAS_SHIFT, KEEPS
        )  # fmt: skip
    else:
        given, root = _weigh(xs, norms, eps, K, WARPS, HAS_NORM)
    y = activate(_sum_products(ws, given, K, WARPS, EACH, True) * root + biases[0], ACT)
    if IS_GATED:
        y *= _sum_products(vs, given, K, WARPS, EACH, IS_GATED) * root + biases[1]
    tl.store(Y + outputs, y.to(Y.dtype.element_ty), mask=outputs < N)


def multiply_normed(
    weight: torch.Tensor,  # (outputs, inputs); gate above value if gated
    x: torch.Tensor,  # (1, inputs)
    out: torch.Tensor,  # (1, outputs), half as many if gated
    tiling: WarpTiling,
    *,
    norm: torch.Tensor | None,
    eps: float,
    centres: bool = True,
    shift: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    activation: int = NONE,
    is_gated: bool = False,
    kept: torch.Tensor | None = None,
) -> None:
    """out = activation(weight @ norm(x) + bias), times the gated half; `kept` gets what a layer norm makes of x."""
    outputs, inputs = weight.shape[0] // (2 if is_gated else 1), weight.shape[1]
    launch(
        _multiply_normed,
        (triton.cdiv(outputs, tiling.rows * tiling.warps),),
        weight,
        x,
        norm if norm is not None else x,
        shift if shift is not None else x,
        bias if bias is not None else x,
        out,
        kept if kept is not None else x,
        eps,
        outputs,
        K=inputs,
        WARPS=tiling.warps,
        EACH=tiling.rows,
        ACT=activation,
        IS_GATED=is_gated,
        IS_LAYER=centres,
        HAS_NORM=norm is not None,
        HAS_SHIFT=shift is not None,
        HAS_BIAS=bias is not None,
        KEEPS=kept is not None,
        IS_EVEN=outputs % (tiling.rows * tiling.warps) == 0,
        num_warps=tiling.warps,
        **launch_options(),
    )
