"""Where whole rows of keys get their memory: taken once, or more of it as rows and positions come."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

CHUNK = 64  # positions by which buffers grow, at least

Allocate = Callable[[tuple[int, ...], torch.dtype, torch.device], torch.Tensor]
"""Takes memory: zeros of a shape. What lies past a short row's end is masked, and masks can't hide a NaN."""


def take_memory(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory on the device itself."""
    return torch.zeros(shape, dtype=dtype, device=device)


@dataclass(slots=True)
class Room:
    """What buffers have room for; `rows` is None if they grow."""

    positions: int
    rows: int | None = None
    take: Allocate = take_memory

    @property
    def is_fixed(self) -> bool:
        """Whether memory is taken once and never moves."""
        return self.rows is not None


def round_up(positions: int) -> int:
    """So many positions in whole chunks."""
    return -(-positions // CHUNK) * CHUNK
