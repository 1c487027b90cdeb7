"""Keys and values that are packed up to a position of each row."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from unspool.kernels.packing import Packed, unpack


@dataclass(slots=True)
class PackedView:
    """The positions of a pass's queries, and how much of each row is packed."""

    num_packed: list[int]  # positions, one count per row: whole blocks
    counts: torch.Tensor  # the same on the device: (rows,) int32
    positions: torch.Tensor  # (rows, new) of the queries, int64
    num_places: int  # the most packed positions of any row: the capacity of a fixed shape, or the most held

    @property
    def is_uniform(self) -> bool:
        """Whether all rows have the same number of packed positions."""
        return all(count == self.num_places for count in self.num_packed)


@dataclass(slots=True)
class PackedKeys:
    """Keys (or values): packed up to a position of each row, in full precision from there on."""

    packed: Packed  # index is position
    recent: torch.Tensor  # (rows, heads, recent, width): index 0 of a row is the first position that is not packed
    view: PackedView

    def unpack(self, stop: int) -> torch.Tensor:
        """All of them at the indices of their positions: (rows, heads, stop, width)."""
        rows, heads, num_recent, width = self.recent.shape
        places = max(self.view.num_packed)
        whole = self.recent.new_zeros(rows, heads, max(places + num_recent, stop), width)
        if places:
            whole[:, :, :places] = unpack(self.packed.narrow(0, places), self.recent.dtype)
        columns = self.view.counts.long()[:, None] + torch.arange(num_recent, device=whole.device)
        index = torch.arange(rows, device=whole.device)[:, None]
        whole[index, :, columns] = self.recent.transpose(1, 2)
        return whole[:, :, :stop]
