"""What a captured pass leaves for its epilogue."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from unspool.kernels.key_layout import KeyLayout


@dataclass(frozen=True, slots=True)
class PassEnd:
    """The buffers of a captured pass after its last layer."""

    logits: torch.Tensor  # (tokens, and once more for every early layer; vocab)
    likeliest: torch.Tensor  # (rows,): to be written by an epilogue that makes scores of the logits
    states: torch.Tensor  # (tokens, hidden): what the head read
    lengths: torch.Tensor  # (rows,) int32
    base: torch.Tensor  # what addresses are counted from
    table: torch.Tensor  # int64: see `kernels.key_layout`
    num_layers: int
    unit: int
    layout: KeyLayout
