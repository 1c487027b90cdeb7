"""The cache that grows with the text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Self

import torch

from unspool.cache.base import Cache
from unspool.cache.contract.capabilities import BRANCH, FIXED_SHAPE, JOIN, LEGACY
from unspool.cache.reference import GrowingSurface, LegacyCache
from unspool.cache.rows import RowCache
from unspool.cache.stores.memory import Room, round_up
from unspool.cache.stores.plain import PlainStore
from unspool.cache.views.branching import BranchingCache
from unspool.errors import SettingError


class DynamicCache(RowCache, GrowingSurface):
    """A cache that grows as tokens arrive, in chunks: no concatenation per token."""

    can = RowCache.can - {FIXED_SHAPE} | {BRANCH, LEGACY}
    takes_padding = True

    def __init__(
        self,
        _distributed_cache_data: Iterable[tuple[torch.Tensor, torch.Tensor]] | None = None,
        *,
        capacity: int | None = None,
    ) -> None:
        super().__init__(self._make_store(Room(round_up(capacity or 1))))
        self._take_legacy(_distributed_cache_data)

    def _make_store(self, room: Room) -> PlainStore:
        return PlainStore(room)

    @classmethod
    def from_legacy_cache(cls, past_key_values: LegacyCache | None = None) -> DynamicCache:
        """A cache holding a tuple of (keys, values) pairs."""
        return cls(past_key_values)

    def take_over(self, layers: Sequence[torch.Tensor] | torch.Tensor, lengths: Sequence[int]) -> None:
        """Hold keys that were made elsewhere, (rows, positions, 2, heads, width) of each layer, without a copy."""
        if self.lengths:
            raise SettingError("a cache that holds rows already can't take over others; use a new one")
        self._store.take_over(list(layers))
        self.lengths = list(lengths)

    def keep_positions(self, index: Sequence[int]) -> None:
        """Hold the keys of these positions alone, the same ones in every row, in this order: later tokens are read as
        if nothing else had been. Keys stay as they were made, rotation included."""
        if any(not 0 <= place < min(self.lengths, default=0) for place in index):
            raise SettingError(f"positions to keep must be held by every row; the rows hold {self.lengths}")
        rows, held = len(self.lengths), max(self.lengths, default=0)
        fresh = self.new_like(max(len(index), 1))
        for layer in range(self._store.num_layers):
            kv = self._store.read(layer, rows, held)
            chosen = torch.tensor(list(index), dtype=torch.int64, device=kv.device)
            fresh._store.fill(layer, kv.index_select(1, chosen))
        self._store, self.lengths = fresh._store, [len(index)] * rows

    def read_layer(self, layer: int) -> torch.Tensor:
        """A layer's keys and values (rows, positions, 2, heads, width) as they lie, up to the longest row's end."""
        return self._store.read(layer, len(self.lengths), max(self.lengths, default=0))

    # --- rows and files ------------------------------------------------------------------------------
    def branch(self, num_branches: int) -> Cache:
        self.require(BRANCH)
        return BranchingCache(self, num_branches)

    def new_like(self, room: int) -> Self:
        return type(self)(capacity=room)

    def take_rows(self, index: Sequence[int]) -> Self:
        self.require(JOIN)
        part = self.new_like(1)
        part._store, part.lengths = self._store.take_rows(index), [self.lengths[row] for row in index]
        return part

    @classmethod
    def _unpack(cls, facts: dict[str, Any], tensors: dict[str, torch.Tensor], lengths: list[int]) -> DynamicCache:
        cache = cls(capacity=max(lengths, default=1))
        cache._fill(tensors, lengths)
        return cache
