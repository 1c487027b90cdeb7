"""The first product of a Mamba block for one row, with the convolution of what it makes.

A program has whole rows of the matrix, and a channel's convolution needs no other channel: so the convolution is the
end of the product, and one kernel less waits for another. The references are `F.linear` after a norm, and
`kernels.scan.convolve`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl

from unspool.kernels.gpu.launching import launch, launch_options, let_next_start, wait_for_input
from unspool.kernels.gpu.products.result import load_biases
from unspool.kernels.gpu.products.row_product import RowTiling, load_ahead, load_tile, load_weights
from unspool.kernels.gpu.products.tilings import choose_tiling
from unspool.kernels.gpu.state_step import begin_window


@dataclass(frozen=True, slots=True)
class ProjectionTiling:
    """How the matrix is cut, and when the inputs that stay in a window are written.

    What is written must have come. Before the wait for the kernel just before, that is another wait for each program:
    in 2.8B's many small programs 180 µs of a step. Behind it, registers hold these inputs.
    """

    cut: RowTiling
    writes_last: bool = False  # behind the product


# (outputs, inputs): in whole steps of Mambas of 2.8B, 1.4B, 790M, 370M and 130M on an H200, 2026-11-17
_MEASURED: Final[dict[tuple[int, int], ProjectionTiling]] = {
    (10240, 2560): ProjectionTiling(RowTiling(2, 512, 2, ahead=3, registers=128), writes_last=True),
    (8192, 2048): ProjectionTiling(RowTiling(2, 256, 1, ahead=8)),
    (6144, 1536): ProjectionTiling(RowTiling(2, 512, 2, ahead=3)),
    (4096, 1024): ProjectionTiling(RowTiling(4, 256, 2, ahead=4)),
    (3072, 768): ProjectionTiling(RowTiling(2, 256, 1, ahead=3)),
}


@triton.jit
def _project_and_convolve(
    W, X, NORM, BIAS, HELD, KEPT, KERNEL, CONV_BIAS, U, ROUNDED, GATES, eps, N,
    K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TAPS: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_CONV_BIAS: tl.constexpr, LAST: tl.constexpr, AHEAD: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * BN
    place, rk = tl.arange(0, BN), tl.arange(0, BK)
    rn = first + place
    is_row = rn < 2 * N
    is_channel = rn < N  # of the convolution; the others are gates
    at = W + first.to(tl.int64) * K + place[:, None] * K + rk[None, :]
    loaded = load_ahead(at, at, is_row, rk, K, BK, AHEAD, False, True)
    biases = load_biases(BIAS, rn, is_row, N, False, HAS_BIAS)
    weights = load_weights(NORM, NORM, NORM, rk, K, BK, True, False, False)
    if EARLY:
        let_next_start(PDL)
    so_far, weight, stay = begin_window(
        HELD, KEPT, KERNEL, CONV_BIAS, 0, rn, is_channel, N, TAPS, HAS_CONV_BIAS, not LAST
    )
    wait_for_input(PDL)
    total, squares = tl.zeros((BN, BK), tl.float32), tl.zeros((BK,), tl.float32)
    for k in tl.static_range(0, K, BK):
        if k < AHEAD * BK:
            w = loaded[0][k // BK]
        else:
            w = load_tile(at, is_row, rk, k, K, BK, True)
        x = tl.load(X + k + rk, mask=rk + k < K, other=0.0).to(tl.float32)
        squares += x * x
        total += w.to(tl.float32) * (x * weights[0][k // BK].to(tl.float32))[None, :]
    if not EARLY:
        let_next_start(PDL)
    y = tl.sum(total, 1) * tl.rsqrt(tl.sum(squares, 0) / K + eps) + biases[0]
    if first < N:
        new = y.to(KEPT.dtype.element_ty)
        tl.store(KEPT + (TAPS - 1) * N + rn, new)
        u = so_far + new.to(tl.float32) * weight
        u *= tl.sigmoid(u)
        tl.store(U + rn, u)
        tl.store(ROUNDED + rn, u.to(ROUNDED.dtype.element_ty))
        if LAST:
            for tap in tl.static_range(TAPS - 1):
                tl.store(KEPT + tap * N + rn, stay[tap])
    else:
        tl.store(GATES + rn - N, y.to(GATES.dtype.element_ty))


def find_projection(project: torch.Tensor) -> ProjectionTiling | None:
    """How `project_and_convolve` cuts a matrix (2 * inner, hidden); None if it can't."""
    outputs, inputs = project.shape
    measured = None if project.dtype == torch.float32 else _MEASURED.get((outputs, inputs))
    if measured is not None:
        return measured
    cut = choose_tiling(outputs, inputs, 1, project.dtype)
    return ProjectionTiling(cut) if cut is not None and (outputs // 2) % cut.rows == 0 else None


def project_and_convolve(
    project: torch.Tensor,  # (2 * inner, hidden): the convolution's inputs, then the gates
    x: torch.Tensor,  # (1, hidden)
    norm: torch.Tensor,  # (hidden,)
    eps: float,
    bias: torch.Tensor | None,  # (2 * inner,)
    held: torch.Tensor,  # (1, taps, inner): the last inputs
    kept: torch.Tensor,  # likewise, with the new ones: written
    kernel: torch.Tensor,  # (taps, inner) float32
    conv_bias: torch.Tensor | None,  # (inner,) float32
    u: torch.Tensor,  # (1, inner) float32: written
    rounded: torch.Tensor,  # (1, inner): the same in the model's dtype
    gates: torch.Tensor,  # (1, inner): written
    tiling: ProjectionTiling,
) -> None:
    """u = silu(convolution of the window), moved on by the first half of project @ rms_norm(x); gates = the second."""
    outputs, inputs = project.shape
    cut = tiling.cut
    launch(
        _project_and_convolve,
        (outputs // cut.rows,),
        project,
        x,
        norm,
        bias if bias is not None else norm,
        held,
        kept,
        kernel,
        conv_bias if conv_bias is not None else kernel,
        u,
        rounded,
        gates,
        eps,
        outputs // 2,
        K=inputs,
        BN=cut.rows,
        BK=min(cut.columns, triton.next_power_of_2(inputs)),
        TAPS=held.shape[1],
        HAS_BIAS=bias is not None,
        HAS_CONV_BIAS=conv_bias is not None,
        LAST=tiling.writes_last,
        AHEAD=cut.ahead,
        EARLY=cut.starts_next_early,
        num_warps=cut.warps,
        maxnreg=cut.registers,
        **launch_options(),
    )
