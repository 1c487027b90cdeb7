"""The cache of fixed size: its buffers never move, so a step over them can be captured."""

from __future__ import annotations

from typing import Any

import torch

from unspool.cache.files import check_room
from unspool.cache.older_names import takes_batch_size
from unspool.cache.rows import RowCache
from unspool.cache.sizes import DeviceMap, KeySizes, read_sizes, unpack_sizes
from unspool.cache.span import Span
from unspool.cache.stored import FixedCache
from unspool.cache.stores.memory import Room, split
from unspool.cache.stores.plain import PlainStore
from unspool.errors import SettingError


class StaticCache(FixedCache, RowCache):
    """A cache whose memory is taken once, for `max_batch_size` rows of `max_cache_len` positions."""

    takes_padding = True

    @takes_batch_size
    def __init__(
        self,
        config: Any,
        max_batch_size: int,
        max_cache_len: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
        layer_device_map: DeviceMap | None = None,
    ) -> None:
        self.max_batch_size = max_batch_size
        self.max_cache_len = max_cache_len or int(config.max_position_embeddings)
        if self.max_batch_size < 1 or self.max_cache_len < 1:
            raise SettingError(
                f"a static cache needs at least one row and one position, "
                f"not max_batch_size={max_batch_size} and max_cache_len={max_cache_len}"
            )
        super().__init__(self._make_store(Room(self.max_cache_len, max_batch_size)))
        read_sizes(config, device, dtype, layer_device_map).open(self._store, max_batch_size)

    def _make_store(self, room: Room) -> PlainStore:
        return PlainStore(room)

    def _pack(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        facts, tensors = super()._pack()
        heads, width = self._buffers[0].shape[-2:]
        return {**facts, "rows": self.max_batch_size, "heads": heads, "width": width}, tensors

    @classmethod
    def _unpack(cls, facts: dict[str, Any], tensors: dict[str, torch.Tensor], lengths: list[int]) -> StaticCache:
        sizes: KeySizes = unpack_sizes(facts, tensors)
        rows, room = (int(facts[name]) for name in ("rows", "capacity"))
        if not 0 < rows <= 2**20 or not max(lengths, default=0) <= room <= 2**24:
            raise ValueError(f"{rows} rows of {room} positions can't be for lengths {lengths}")
        check_room(rows * room * sizes.position_bytes, tensors)
        cache = cls(sizes.as_config(), rows, room, sizes.devices[0], sizes.dtype)
        cache._fill(tensors, lengths)
        return cache

    # --- the reference's surface ---------------------------------------------------------------------
    def get_mask_sizes(self, query_length: int | torch.Tensor, layer_idx: int = 0) -> tuple[int, int]:
        """`update` returns whole buffers."""
        assert self.max_cache_len is not None
        return self.max_cache_len, 0

    def _append(self, layer: int, span: Span, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The whole buffers are returned, as the reference's are."""
        super()._append(layer, span, kv)
        return split(self.rows_of(layer))
