"""Buffers (rows, positions, 2, heads, width): how they lie, and where their memory comes from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

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


class KeyFormat(NamedTuple):
    """What the keys of one position are."""

    heads: int
    width: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, kv: torch.Tensor) -> KeyFormat:
        """The format of keys and values (…, heads, width)."""
        return cls(kv.shape[-2], kv.shape[-1], kv.dtype, kv.device)


def split(kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values (rows, heads, places, width) of a buffer (rows, places, 2, heads, width)."""
    keys, values = kv.unbind(2)
    return keys.transpose(1, 2), values.transpose(1, 2)


def join(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Keys and values (rows, heads, places, width) as a buffer has them: (rows, places, 2, heads, width)."""
    return torch.stack((keys.transpose(1, 2), values.transpose(1, 2)), dim=2)
