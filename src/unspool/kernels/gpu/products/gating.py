"""activation(gate) · value of a step's rows in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from unspool.kernels.gpu.launching import launch, launch_options, let_next_start, wait_for_input
from unspool.kernels.gpu.products.activations import activate

BLOCK = 1024


@triton.jit
def _gate(UP, OUT, N, ACT: tl.constexpr, IS_GATED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    width = 2 * N if IS_GATED else N
    let_next_start(PDL)
    wait_for_input(PDL)
    y = activate(tl.load(UP + row * width + at, mask=at < N, other=0.0).to(tl.float32), ACT)
    if IS_GATED:
        y *= tl.load(UP + row * width + N + at, mask=at < N, other=0.0).to(tl.float32)
    tl.store(OUT + row * N + at, y.to(OUT.dtype.element_ty), mask=at < N)


def gate(up: torch.Tensor, activation: int, out: torch.Tensor) -> None:
    """out (rows, inner) from up (rows, inner), or from (rows, 2 * inner) if it is gated."""
    rows, inner = out.shape
    launch(
        _gate,
        (rows, triton.cdiv(inner, BLOCK)),
        up,
        out,
        inner,
        ACT=activation,
        IS_GATED=up.shape[1] != inner,
        BLOCK=BLOCK,
        **launch_options(),
    )
