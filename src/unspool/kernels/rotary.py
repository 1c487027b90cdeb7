"""Rotary position embedding (Su et al., 2021) on neighbouring pairs, in place."""

from __future__ import annotations

from collections.abc import Sequence

import torch

_FIRST_TABLE = 512  # positions a table starts with


class RotaryTable:
    """The rotation of every pair at every position, as complex numbers; it grows on demand."""

    def __init__(self, frequencies: Sequence[float], gain: float, device: torch.device) -> None:
        self._frequencies = torch.tensor(frequencies, dtype=torch.float32, device=device)  # (pairs,)
        self._gain = gain
        self.table = self._make(_FIRST_TABLE)  # (positions, pairs) complex64

    @property
    def width(self) -> int:
        """How many numbers of a head are rotated."""
        return 2 * self._frequencies.numel()

    def _make(self, num_positions: int) -> torch.Tensor:
        positions = torch.arange(num_positions, dtype=torch.float32, device=self._frequencies.device)
        angles = positions[:, None] * self._frequencies
        return torch.complex(angles.cos() * self._gain, angles.sin() * self._gain)

    def find_turns(self, shifts: torch.Tensor) -> torch.Tensor:
        """The factors that move rotated keys by `shifts` (rows,) positions: (rows, 1, 1, pairs)."""
        angles = shifts.to(self._frequencies.device, torch.float32)[:, None] * self._frequencies
        return torch.polar(torch.ones_like(angles), angles)[:, None, None]

    def find_factors(self, turns: torch.Tensor) -> torch.Tensor:
        """The factors of heads whose pairs have positions of their own (rows, new, pairs): (rows, new, 1, pairs)."""
        angles = turns.to(self._frequencies.device, torch.float32) * self._frequencies
        return torch.complex(angles.cos() * self._gain, angles.sin() * self._gain).unsqueeze(2)

    def reserve(self, num_positions: int) -> torch.Tensor:
        """The table, extended to at least `num_positions`."""
        if num_positions > self.table.shape[0]:
            self.table = self._make(max(num_positions, 2 * self.table.shape[0]))
        return self.table


def rotate_(heads: torch.Tensor, factors: torch.Tensor, *, is_halved: bool = False) -> None:
    """Rotate the pairs at the front of each head (rows, new, heads, width) by factors (rows or 1, new, 1, pairs).

    The rotated pairs are neighbours; before, they may be the two halves of what is rotated (`is_halved`).
    """
    turned = heads[..., : 2 * factors.shape[-1]]
    pairs = turned.view(*turned.shape[:-1], -1, 2)
    if heads.dtype == torch.float32 and not is_halved:
        torch.view_as_complex(pairs).mul_(factors)
        return
    given = split_pairs(turned, is_halved=is_halved)
    wide = torch.view_as_complex(given.to(torch.float32, memory_format=torch.contiguous_format, copy=True))
    pairs.copy_(torch.view_as_real(wide * factors))


def split_pairs(turned: torch.Tensor, *, is_halved: bool) -> torch.Tensor:
    """The pairs (…, pairs, 2) of what is rotated of heads (…, width): neighbours, or one number of each half."""
    if is_halved:
        return turned.view(*turned.shape[:-1], 2, -1).transpose(-1, -2)
    return turned.view(*turned.shape[:-1], -1, 2)
