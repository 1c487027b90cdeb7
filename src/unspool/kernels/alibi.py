"""Attention with linear biases (Press et al., 2022): one slope per head, times the key's position."""

from __future__ import annotations

import math

import torch


def alibi_slopes(num_heads: int) -> torch.Tensor:
    """The slopes of all heads; if their number is not a power of two, the rest lie between the first ones."""
    nearest = 1 << (num_heads.bit_length() - 1)
    slopes = [_root(nearest) ** (i + 1) for i in range(nearest)]
    slopes += [_root(2 * nearest) ** (2 * i + 1) for i in range(num_heads - nearest)]
    return torch.tensor(slopes, dtype=torch.float32)  # (heads,)


def _root(num_heads: int) -> float:
    return float(2.0 ** -(2.0 ** -(math.log2(num_heads) - 3)))


def alibi_bias(num_heads: int, num_keys: int, *, scale: float = 1.0, is_rounded: bool = False) -> torch.Tensor:
    """The bias to add to the scores of each key: (heads, keys) float32.

    Only differences between keys matter to a softmax, so the key's own position will do for every query.
    `is_rounded` computes in bfloat16, as Falcon was trained.
    """
    slopes, keys = alibi_slopes(num_heads)[:, None], torch.arange(num_keys)
    bias = (slopes.bfloat16() * keys).float() if is_rounded else slopes * keys
    return bias * scale
