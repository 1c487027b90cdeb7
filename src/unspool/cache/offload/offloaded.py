"""Caches whose keys live where memory is cheap: beside the GPU, or in a file if there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import torch

from unspool.cache.contract.capabilities import BRANCH, DIVIDE, FLAT, FORK
from unspool.cache.dynamic import DynamicCache
from unspool.cache.offload.store import HOST, AwayStore
from unspool.cache.rows import RowCache
from unspool.cache.sizes import DeviceMap
from unspool.cache.span import Span
from unspool.cache.static import StaticCache
from unspool.cache.stores.memory import Room, split
from unspool.errors import SettingError


class OffloadingCache(RowCache):
    """What offloaded caches share."""

    lives_elsewhere = True
    takes_padding = False
    _store: AwayStore

    def _append(self, layer: int, span: Span, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self._store.begin(span)
        held = self._store.held()
        like = held[layer] if layer < len(held) else None
        self._store.write_home(layer, span, kv if like is None else kv.to(like.device, like.dtype))
        whole = self._read(layer, len(span.starts), span.stop)
        keys, values = split(self.rows_of(layer)) if isinstance(self, StaticCache) else whole
        return keys.to(kv.device), values.to(kv.device)

    def prefetch_layer(self, layer_idx: int) -> None:
        """Start bringing a layer to the GPU; without one there is nothing to do."""
        store = self._store
        if store.ferry is not None and layer_idx < store.num_layers and self.lengths:
            store.settle()
            store.ferry.fetch_ahead(layer_idx, store.buffers[layer_idx], max(self.lengths), len(self.lengths))

    def evict_previous_layer(self, layer_idx: int) -> None:
        """Nothing to do: a layer goes home with the pass that wrote it."""

    @property
    def device_bytes(self) -> int:
        """Bytes of GPU memory in use."""
        staying = sum(buffer.nbytes for buffer in self._buffers if buffer.device.type != "cpu")
        return staying + (self._store.ferry.nbytes if self._store.ferry is not None else 0)


class OffloadedCache(OffloadingCache, DynamicCache):
    """A dynamic cache whose keys live in pinned host memory, or in a temporary file on a machine without a GPU."""

    can = DynamicCache.can - {FORK, DIVIDE, FLAT, BRANCH}  # keys that are on their way belong to all rows

    def __init__(
        self,
        *,
        capacity: int | None = None,
        folder: str | Path | None = None,
        resident_layers: int = 0,
        num_layers: int = 0,
    ) -> None:
        self._wishes = (folder, resident_layers, num_layers)
        DynamicCache.__init__(self, capacity=capacity)

    def _make_store(self, room: Room) -> AwayStore:
        return AwayStore(room, *self._wishes)

    def new_like(self, room: int) -> Self:
        folder, resident_layers, num_layers = self._wishes
        like = type(self)(capacity=room, folder=folder, resident_layers=resident_layers, num_layers=num_layers)
        like._store.move_to(self._store.device)
        return like


class OffloadedStaticCache(OffloadingCache, StaticCache):
    """A static cache whose keys live in host memory: fixed room, on the device only two layers at a time."""

    can = StaticCache.can - {FORK, DIVIDE, FLAT}

    def __init__(
        self,
        config: Any,
        max_batch_size: int,
        max_cache_len: int | None,
        device: str | torch.device,
        dtype: torch.dtype | None = None,
        offload_device: str | torch.device = HOST,
        layer_device_map: DeviceMap | None = None,
        *,
        folder: str | Path | None = None,
        resident_layers: int = 0,
    ) -> None:
        if torch.device(offload_device).type != "cpu":
            raise SettingError(f"keys are offloaded to the CPU's memory, not to {offload_device}")
        self.offload_device = torch.device(offload_device)
        self._wishes = (torch.device(device), folder, resident_layers, int(config.num_hidden_layers))
        StaticCache.__init__(
            self, config, max_batch_size, max_cache_len, device, dtype or torch.float32, layer_device_map
        )

    def _make_store(self, room: Room) -> AwayStore:
        device, folder, resident_layers, num_layers = self._wishes
        store = AwayStore(room, folder, resident_layers, num_layers)
        store.move_to(device)
        return store
