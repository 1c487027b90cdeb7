"""How keys and values of a position stand side by side: (rows, positions, 2, heads, width)."""

from __future__ import annotations

import torch


def split(kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values (rows, heads, places, width) of a buffer (rows, places, 2, heads, width)."""
    keys, values = kv.unbind(2)
    return keys.transpose(1, 2), values.transpose(1, 2)


def join(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Keys and values (rows, heads, places, width) as a buffer has them: (rows, places, 2, heads, width)."""
    return torch.stack((keys.transpose(1, 2), values.transpose(1, 2)), dim=2)
