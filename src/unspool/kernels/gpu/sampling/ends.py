"""What a captured pass leaves for its epilogue."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from unspool.kernels.key_layout import KeyLayout


@dataclass(frozen=True, slots=True)
class PassEnd:
    """The buffers of a captured pass after its last layer."""

    logits: torch.Tensor  # (tokens * (1 + early layers), vocab)
    tokens: torch.Tensor  # (tokens,) int64: what was read
    likeliest: torch.Tensor  # (rows,): written by an epilogue that computes scores from the logits
    states: torch.Tensor  # (tokens, hidden): the head's input
    lengths: torch.Tensor  # (rows,) int32
    log: torch.Tensor | None  # (lines, rows) int64: what steps chose, if a step's tokens are the next one's input
    base: torch.Tensor  # addresses are offsets from it
    table: torch.Tensor  # int64: see `kernels.key_layout`
    num_layers: int
    unit: int
    layout: KeyLayout
