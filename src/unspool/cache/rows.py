"""What dynamic, static and offloaded caches share: whole rows in one buffer per layer."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any, Self

import torch

from unspool.cache.base import Cache
from unspool.cache.contract.capabilities import DIVIDE, FIXED_SHAPE, FLAT, FORK, JOIN, RAGGED, ROLL_BACK, SELECT_ROWS
from unspool.cache.stored import StoredCache
from unspool.cache.stores.plain import PlainStore


class RowCache(StoredCache):
    """Rows that lie whole in buffers (rows, positions, 2, heads, width)."""

    can = frozenset({ROLL_BACK, SELECT_ROWS, RAGGED, FORK, DIVIDE, FLAT, FIXED_SHAPE, JOIN})
    _store: PlainStore

    @property
    def _buffers(self) -> list[torch.Tensor]:
        return self._store.buffers

    def rows_of(self, layer: int) -> torch.Tensor:
        """A layer's buffer, without rows that are kept for later."""
        return self._store.rows_of(layer, len(self.lengths))

    def new_like(self, room: int) -> Self:
        """An empty cache of the same kind that grows."""
        raise NotImplementedError

    def copy_rows(self, index: Sequence[int], first: int) -> None:
        """Let rows become what others are from position `first` on: what lies before it is the same already."""
        if self.lengths:
            self._store.copy_rows(index, first, max(self.lengths))
            self.lengths = [self.lengths[row] for row in index]

    @property
    def can_follow(self) -> bool:
        """On a GPU, if rows are few."""
        return bool(self.lengths) and self._store.can_follow(len(self.lengths))

    def follow_rows(self, index: torch.Tensor) -> None:
        """Beams go on from others of their prompt, which are as long."""
        self._store.follow(index, max(self.lengths))

    def divide(self, num_parts: int, num_new: int) -> list[Cache]:
        self.require(DIVIDE)
        rows, held = len(self.lengths), max(self.lengths, default=0)
        self._reserve(held + num_new)  # here: a part that grew would write into buffers of its own
        parts: list[Cache] = []
        for first in range(num_parts):
            part = copy(self)
            part.lengths = self.lengths[first::num_parts]
            part._store = self._store.take_part(first, num_parts, rows)
            parts.append(part)
        return parts

    # --- files ---------------------------------------------------------------------------------------
    def _pack(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        held = self._store.pack(len(self.lengths), max(self.lengths, default=0))
        return {"capacity": self._store.room.positions}, {f"layer.{layer}": part for layer, part in enumerate(held)}

    def _fill(self, tensors: dict[str, torch.Tensor], lengths: list[int]) -> None:
        """Take in what `_pack` gave, for rows of the given lengths."""
        for layer in range(len(tensors)):
            held = tensors[f"layer.{layer}"]
            if held.dim() != 5 or held.shape[:2] != (len(lengths), max(lengths, default=0)) or held.shape[2] != 2:
                raise ValueError(f"layer {layer} has the shape {list(held.shape)} for rows of {lengths}")
            self._store.fill(layer, held)
        self.lengths = list(lengths)
