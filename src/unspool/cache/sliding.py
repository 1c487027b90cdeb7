"""Caches for models with windows: a ring for every layer that slides, and every key for those that don't."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from unspool.cache.contract.capabilities import FIXED_SHAPE, JOIN, RAGGED, SELECT_ROWS, TRIAL
from unspool.cache.files import check_room
from unspool.cache.older_names import takes_batch_size
from unspool.cache.reference import count_queries
from unspool.cache.sizes import (
    DeviceMap,
    KeySizes,
    read_kinds,
    read_sizes,
    read_window,
    unpack_sizes,
)
from unspool.cache.span import Mask, Span
from unspool.cache.stored import FixedCache, StoredCache
from unspool.cache.stores.memory import Allocate, Room, split, take_memory
from unspool.cache.stores.mixed import MixedStore
from unspool.cache.stores.plain import PlainStore
from unspool.cache.stores.ring import RingStore
from unspool.cache.stores.store import Store
from unspool.errors import SettingError, UnsupportedError


class LayeredCache(FixedCache):
    """A cache whose layers are full or sliding: sliding ones hold a window's keys in a ring."""

    can = frozenset({TRIAL, SELECT_ROWS, RAGGED, FIXED_SHAPE, JOIN})
    window: int
    _store: MixedStore

    def __init__(
        self,
        kinds: Sequence[str],
        window: int,
        rows: int,
        positions: int,
        sizes: KeySizes,
        allocate: Allocate = take_memory,
    ) -> None:
        if rows < 1 or positions < 1:
            raise SettingError(f"a cache needs at least one row and one position, not {rows} and {positions}")
        self.max_batch_size, self.max_cache_len = rows, positions
        self.kinds, self.window = tuple(kinds), window
        self._ring_size = min(window, positions)
        stores: dict[str, Store] = {}
        if "full" in self.kinds:
            stores["full"] = PlainStore(Room(positions, rows, allocate))
        if "sliding" in self.kinds:
            stores["sliding"] = RingStore(Room(self._ring_size, rows, allocate))
        super().__init__(MixedStore(stores, kinds))
        sizes.open(self._store, rows)

    @property
    def room(self) -> int | None:
        """The most positions that a row can get; None if it can go on for ever."""
        # A window that was given less than its size can't forget, so it ends where it is full.
        is_bounded = "full" in self.kinds or self._ring_size < self.window
        return self.max_cache_len if is_bounded else None

    def mask(self, span: Span, window: int | None = None) -> Mask:
        kind = "full" if window is None else "sliding"
        if kind not in self.kinds:
            raise UnsupportedError(
                f"the model has {kind} layers and this {type(self).__name__} has none; make it from the model's own "
                "config, or use cache_implementation='hybrid' or 'dynamic'"
            )
        if window is not None and window > self._ring_size and span.stop > self._ring_size:
            raise UnsupportedError(
                f"the model's layers see {window} keys back and this cache keeps {self._ring_size}; "
                "make it from the model's own config"
            )
        return super().mask(span, window)

    def stands_in_order(self, window: int | None) -> bool:
        return window is None

    def _join(self, other: StoredCache) -> None:
        assert isinstance(other, LayeredCache)
        if other.kinds != self.kinds:
            raise SettingError("rows of other kinds of layers can't join; make both caches for the same model")
        super()._join(other)

    # --- files ---------------------------------------------------------------------------------------
    def _pack(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        buffers, held = self._held_tensors(), max(self.lengths, default=0)
        heads, width = buffers[0].shape[-2:]
        facts = {
            "kinds": list(self.kinds),
            "window": self.window,
            "rows": self.max_batch_size,
            "positions": self.max_cache_len,
            "heads": heads,
            "width": width,
        }
        return facts, {
            f"layer.{layer}": buffer[: len(self.lengths), : min(held, buffer.shape[1])]
            for layer, buffer in enumerate(buffers)
        }

    @classmethod
    def _unpack(cls, facts: dict[str, Any], tensors: dict[str, torch.Tensor], lengths: list[int]) -> LayeredCache:
        kinds, sizes = [str(kind) for kind in facts["kinds"]], unpack_sizes(facts, tensors)
        rows, positions, window = (int(facts[name]) for name in ("rows", "positions", "window"))
        if not 0 < rows <= 2**20 or not 0 < positions <= 2**24 or window < 1 or len(kinds) != len(tensors):
            raise ValueError(f"{rows} rows of {positions} positions, window {window}, {len(kinds)} layers")
        check_room(rows * positions * sizes.position_bytes, tensors)
        cache = cls.__new__(cls)
        LayeredCache.__init__(cache, kinds, window, rows, positions, sizes)
        for layer, buffer in enumerate(cache._held_tensors()):
            held = tensors[f"layer.{layer}"]
            buffer[: len(lengths), : held.shape[1]] = held
        cache.lengths = lengths
        return cache

    # --- the reference's surface ---------------------------------------------------------------------
    def _append(self, layer: int, span: Span, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The buffers are returned, oldest position first; what does not fit a window is returned whole, behind it."""
        if self.kinds[layer] != "sliding" or span.num_new == 1 or span.stop <= self._ring_size:
            return super()._append(layer, span, kv)
        held = min(span.starts[0], self._ring_size)
        before = self._read(layer, len(span.starts), span.starts[0])
        whole = tuple(
            torch.cat((old[:, :, :held], new), dim=2) for old, new in zip(before, split(kv.to(before[0])), strict=True)
        )
        super()._append(layer, span, kv)
        return whole[0], whole[1]

    def get_mask_sizes(self, query_length: int | torch.Tensor, layer_idx: int = 0) -> tuple[int, int]:
        num_new, start = count_queries(query_length), self.get_seq_length(layer_idx)
        if layer_idx >= len(self.kinds) or self.kinds[layer_idx] != "sliding":
            return self.max_cache_len or 0, 0
        stop, size = start + num_new, self._ring_size
        if num_new > 1 and stop > size:
            return min(start, size) + num_new, start - min(start, size)
        return size, max(stop - size, 0)

    @property
    def is_sliding(self) -> tuple[bool, ...]:
        return tuple(kind == "sliding" for kind in self.kinds)

    def _read(self, layer: int, rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        store, number = self._store.find(layer)
        assert isinstance(store, PlainStore)
        rows = rows or self.max_batch_size or 0
        return split(store.read(number, rows, length) if isinstance(store, RingStore) else store.rows_of(number, rows))


class SlidingWindowCache(LayeredCache):
    """A cache for models all of whose layers slide (Mistral): memory is bounded by the window, texts are not."""

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
        window = read_window(config)
        if window is None:
            raise SettingError(
                "a SlidingWindowCache needs a window, and the config has no sliding_window; use a DynamicCache"
            )
        sizes = read_sizes(config, device, dtype, layer_device_map)
        super().__init__(["sliding"] * len(sizes.devices), window, max_batch_size, max_cache_len or window, sizes)


class HybridCache(LayeredCache):
    """A cache for models some of whose layers slide (Gemma 2 and 3): rings beside buffers of every key."""

    @takes_batch_size
    def __init__(
        self,
        config: Any,
        max_batch_size: int,
        max_cache_len: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
        layer_device_map: DeviceMap | None = None,
        *,
        allocate: Allocate = take_memory,
    ) -> None:
        kinds, window = read_kinds(config), read_window(config)
        longest = max_cache_len or int(config.max_position_embeddings)
        if window is None:
            if "sliding" in kinds:
                raise SettingError(
                    "the config names sliding layers and no sliding_window; give it one, or use a StaticCache"
                )
            window = longest
        sizes = read_sizes(config, device, dtype, layer_device_map)
        super().__init__(kinds, window, max_batch_size, longest, sizes, allocate)


def refuse_without_window(info: Any) -> str | None:
    """Why a model can't decode with rings alone, or None if it can."""
    if getattr(info, "is_encoder_decoder", False) or not info.window or "sliding" not in info.layer_kinds:
        return f"a {info.family} model has no sliding window; use 'dynamic' or 'static'"
    if "full" in info.layer_kinds:
        return f"some layers of this {info.family} model see the whole text; use 'hybrid'"
    return None


def refuse_encoder_decoder(info: Any) -> str | None:
    """Why a kind for decoders can't serve a model, or None if it can."""
    return f"a {info.family} model has an encoder; use 'dynamic' or 'static'" if info.is_encoder_decoder else None
