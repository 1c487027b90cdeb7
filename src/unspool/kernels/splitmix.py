"""SplitMix64 (Steele et al., 2014): the hash behind random numbers, on Python's integers and on int64 tensors.

`gpu.mixing` is the same in kernels, `cpu/csrc/marks.h` in C.
"""

from __future__ import annotations

from typing import Final

import torch

STEP: Final = 0x9E3779B97F4A7C15  # from one state to the next
MASK: Final = (1 << 64) - 1
_MIX_1: Final = 0xBF58476D1CE4E5B9
_MIX_2: Final = 0x94D049BB133111EB


def mix(value: int) -> int:
    """The finaliser of a 64-bit number."""
    value &= MASK
    value = ((value ^ (value >> 30)) * _MIX_1) & MASK
    value = ((value ^ (value >> 27)) * _MIX_2) & MASK
    return value ^ (value >> 31)


def mix_tensor(value: torch.Tensor) -> torch.Tensor:
    """`mix` on int64 tensors, whose products wrap around as the unsigned ones do."""
    value = (value ^ shift(value, 30)) * as_signed(_MIX_1)
    value = (value ^ shift(value, 27)) * as_signed(_MIX_2)
    return value ^ shift(value, 31)


def shift(value: torch.Tensor, bits: int) -> torch.Tensor:
    """A logical shift to the right: torch's own keeps the sign."""
    return (value >> bits).bitwise_and((1 << (64 - bits)) - 1)


def as_signed(value: int) -> int:
    """The number in 64 bits, as int64 reads them."""
    return value - (1 << 64) if value >= 1 << 63 else value
