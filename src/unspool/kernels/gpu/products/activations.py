"""Activation functions inside kernels: the formulas of `kernels.activations`, selected by number."""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

NONE: Final = 0
CODES: Final[dict[str, int]] = {
    "silu": 1,
    "swish": 1,
    "relu": 2,
    "gelu": 3,
    "gelu_new": 4,
    "gelu_fast": 4,
    "gelu_pytorch_tanh": 4,
    "quick_gelu": 5,
    "relu2": 6,
}


@triton.jit
def activate(x, CODE: tl.constexpr):
    """An activation of float32 numbers."""
    if CODE == 1:
        x = x * tl.sigmoid(x)
    elif CODE == 2:
        x = tl.maximum(x, 0.0)
    elif CODE == 3:
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif CODE == 4:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        x = x * tl.sigmoid(2.0 * inner)  # (1 + tanh(a)) / 2 is sigmoid(2a)
    elif CODE == 5:
        x = x * tl.sigmoid(1.702 * x)
    elif CODE == 6:
        x = tl.maximum(x, 0.0)
        x = x * x
    return x
