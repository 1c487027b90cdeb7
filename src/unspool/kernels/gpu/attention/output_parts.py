"""The output of an attention in parts, one for each program that read a part of the keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

WARP_KEYS: Final = 16  # of a warp in a tile of `held_attention`


@dataclass(frozen=True, slots=True)
class PartedTiling:
    """How keys are split: keys per tile, the most programs per head, and their warps."""

    block: int
    splits: int
    warps: int


@dataclass(frozen=True, slots=True)
class Parts:
    """What the programs of an attention found: outputs of their own keys, and how to weigh them."""

    values: torch.Tensor  # (rows, splits, heads, width)
    stats: torch.Tensor  # (rows, 2, splits, heads) float32: the highest scores, and the weights' sums relative to them
    lengths: torch.Tensor  # (rows / rows_each,): keys, from which follows how many of the splits there are
    block: int
    rows_each: int = 1  # rows that read the same keys


@dataclass(frozen=True, slots=True)
class Turning:
    """What is done to queries and new keys before they meet: a norm of root mean squares per head, and rope."""

    turns: torch.Tensor  # (rows, 2, pairs) float32: cosines and sines
    is_halved: bool  # the pairs that are turned are halves of what they are turned in
    q_norm: torch.Tensor | None = None  # (width,)
    k_norm: torch.Tensor | None = None
    eps: float = 0.0
