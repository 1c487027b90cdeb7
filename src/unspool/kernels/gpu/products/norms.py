"""Root-mean-square norms of a step's rows, with the residual added in the same pass (reference: `kernels.norms`)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from unspool.kernels.gpu.launching import launch, launch_options, let_next_start, wait_for_input


@triton.jit
def _normalise(X, WEIGHT, OUT, eps, N, BLOCK: tl.constexpr, ADDS: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * N
    at = tl.arange(0, BLOCK)
    weight = tl.load(WEIGHT + at, mask=at < N, other=0.0).to(tl.float32)
    let_next_start(PDL)
    wait_for_input(PDL)
    x = tl.load(X + row + at, mask=at < N, other=0.0).to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, 0) / N + eps) * weight
    if ADDS:
        y += tl.load(OUT + row + at, mask=at < N, other=0.0).to(tl.float32)
    tl.store(OUT + row + at, y.to(OUT.dtype.element_ty), mask=at < N)


def normalise(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor, *, adds: bool = False) -> None:
    """out = rms_norm(x), or out += rms_norm(x) if a block normalises what it adds: (rows, hidden)."""
    rows, width = x.shape
    block = triton.next_power_of_2(width)
    launch(
        _normalise,
        (rows,),
        x,
        weight,
        out,
        eps,
        width,
        BLOCK=block,
        ADDS=adds,
        num_warps=8 if block >= 2048 else 4,
        **launch_options(),
    )
