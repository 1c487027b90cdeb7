"""What stands after a product of a few rows: the norm's root, bias, activation, gate and residual."""

from __future__ import annotations

import triton
import triton.language as tl

from unspool.kernels.gpu.activations import activate


@triton.jit
def write_result(
    total, other, squares, row, rn, is_output, BIAS, Y, eps, N,
    K: tl.constexpr, ACT: tl.constexpr, IS_GATED: tl.constexpr, ADDS: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """One row's outputs `rn` from its products (outputs, columns), those of the gated half and the input's squares."""
    y = tl.sum(total, 1)  # before the squares: fewer numbers are held at the same time
    root = 1.0
    if HAS_NORM:
        root = tl.rsqrt(tl.sum(squares, 0) / K + eps)
        y *= root
    if HAS_BIAS:
        y += tl.load(BIAS + rn, mask=is_output, other=0.0).to(tl.float32)
    y = activate(y, ACT)
    if IS_GATED:
        z = tl.sum(other, 1) * root
        if HAS_BIAS:
            z += tl.load(BIAS + N + rn, mask=is_output, other=0.0).to(tl.float32)
        y *= z
    into = Y + row * N.to(tl.int64) + rn
    if ADDS:
        y += tl.load(into, mask=is_output, other=0.0).to(tl.float32)
    tl.store(into, y.to(Y.dtype.element_ty), mask=is_output)
