"""The gate of an expert inside kernels (reference: `models.decoder.mixture.join_gate`)."""

from __future__ import annotations

import triton
import triton.language as tl

from unspool.kernels.gpu.products.activations import activate


@triton.jit
def join_gate(gate, value, limit, gain, ACT: tl.constexpr, HAS_LIMIT: tl.constexpr):
    """activation(gate) · value, or gpt-oss's form of it: both sides within a limit, the value counted from -1."""
    if HAS_LIMIT:
        gate = tl.minimum(gate, limit)
        value = tl.minimum(tl.maximum(value, -limit), limit)
        joined = gate * tl.sigmoid(gain * gate) * (value + 1.0)
    else:
        joined = activate(gate, ACT) * value
    return joined
