"""Where a cache's keys lie in memory: what a captured step, which finds them by address, must know."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """The buffers (rows, capacity, 2, heads, width) of all layers; another object once anything has moved.

    Rows that share a prompt's keys have those in `shared`, and find their own position `j` in the row that
    `ancestry[row, j]` names.
    """

    buffers: list[torch.Tensor]
    branches: int = 0  # rows a prompt; 0 where nothing is shared
    shared: list[torch.Tensor] | None = None
    prompt_lengths: list[int] | None = None  # shared positions, a row each
    ancestry: torch.Tensor | None = None  # (rows, own capacity) int32
