"""The hash behind random numbers in kernels."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def mix(value):
    """SplitMix64's finaliser (Steele et al., 2014) of 64-bit integers, taken as unsigned."""
    value = value.to(tl.uint64)
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    return value ^ (value >> 31)
