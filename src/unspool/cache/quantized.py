"""Caches in few bits: one that grows, one whose memory is taken once, and one whose layers may have windows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Self

import torch

from unspool.cache.contract.capabilities import FIXED_SHAPE, JOIN, RAGGED, ROLL_BACK, SELECT_ROWS, TRIAL
from unspool.cache.offload.memory import take_linked
from unspool.cache.reference import GrowingSurface
from unspool.cache.sizes import KeySizes, read_kinds, read_sizes, read_window
from unspool.cache.span import Span
from unspool.cache.stored import FixedCache, StoredCache
from unspool.cache.stores.memory import Allocate, Room, take_memory
from unspool.cache.stores.packed import PackedStore, list_recent
from unspool.cache.stores.quantization import QuantizedCacheConfig
from unspool.errors import SettingError
from unspool.kernels.packing import fit_range


class QuantizedCache(StoredCache, GrowingSurface):
    """A cache that packs what is no longer recent, with unspool's own quantiser."""

    can = frozenset({ROLL_BACK, TRIAL, SELECT_ROWS, RAGGED, JOIN})
    rolls_back_exactly = False
    backend: str | None = None  # the one a kind stands for; None: the config's, packed by unspool itself
    _larger_kind = "quantized"
    _store: PackedStore

    def __init__(self, cache_config: QuantizedCacheConfig, *, capacity: int | None = None) -> None:
        config = cache_config
        if self.backend is not None and config.backend != self.backend:
            config = QuantizedCacheConfig(**{**config.to_dict(), "backend": self.backend})
        fit = config.find_backend().find_fit() if self.backend is not None else fit_range
        self._hold(config, PackedStore(config, fit, Room(capacity or 0)))

    def _hold(self, config: QuantizedCacheConfig, store: PackedStore) -> None:
        StoredCache.__init__(self, store)
        self.cache_config = config
        self.nbits, self.q_group_size, self.residual_length = config.nbits, config.q_group_size, config.residual_length
        self.axis_key, self.axis_value = config.axis_key, config.axis_value
        self.compute_dtype, self.device = config.compute_dtype, config.device

    def take_rows(self, index: Sequence[int]) -> Self:
        self.require(JOIN)
        part = type(self)(self.cache_config)
        part._store = self._store.take_rows(index, self.lengths)
        part.lengths = [self.lengths[row] for row in index]
        return part

    # --- files ---------------------------------------------------------------------------------------
    def _pack(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        return self._store.pack()

    @classmethod
    def _unpack(cls, facts: dict[str, Any], tensors: dict[str, torch.Tensor], lengths: list[int]) -> QuantizedCache:
        cache = cls._make_like(QuantizedCacheConfig(**facts["config"]), facts, tensors)
        cache._store.unpack(facts, tensors, lengths)
        cache.lengths = lengths
        return cache

    @classmethod
    def _make_like(
        cls,
        config: QuantizedCacheConfig,
        facts: dict[str, Any],
        tensors: dict[str, torch.Tensor],
    ) -> Self:
        """An empty cache of the size that was saved."""
        return cls(config)

    # --- the reference's surface ---------------------------------------------------------------------
    def _append(self, layer: int, span: Span, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._store.append(layer, span, kv)

    @classmethod
    def from_legacy_cache(
        cls,
        past_key_values: Sequence[tuple[torch.Tensor, torch.Tensor]] | None = None,
        cache_config: QuantizedCacheConfig | None = None,
    ) -> Self:
        """A cache that packs a tuple of (keys, values) pairs."""
        return cls(cache_config or QuantizedCacheConfig(backend=cls.backend or "unspool"))._take_legacy(past_key_values)


class QuantoQuantizedCache(QuantizedCache):
    """A cache in 2 or 4 bits as optimum-quanto fits them if it is installed, otherwise as unspool does."""

    backend = "quanto"


class HQQQuantizedCache(QuantizedCache):
    """A cache in 2, 4 or 8 bits as hqq fits them if it is installed, otherwise as unspool does."""

    backend = "HQQ"


QUANTIZED_CACHES: Final[dict[str, type[QuantizedCache]]] = {
    "unspool": QuantizedCache,
    "quanto": QuantoQuantizedCache,
    "HQQ": HQQQuantizedCache,
}


class QuantizedStaticCache(FixedCache, QuantizedCache):
    """A quantised cache whose memory is taken once: its buffers never move, so a step over them can be captured."""

    can = frozenset({ROLL_BACK, TRIAL, SELECT_ROWS, RAGGED, FIXED_SHAPE, JOIN})
    takes_positions = False

    def __init__(
        self,
        cache_config: QuantizedCacheConfig,
        config: Any,
        max_batch_size: int,
        max_cache_len: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._take_all(cache_config, read_sizes(config, device, dtype), max_batch_size, max_cache_len)

    def _take_all(
        self,
        config: QuantizedCacheConfig,
        sizes: KeySizes,
        rows: int,
        positions: int,
        windows: Sequence[int | None] = (),
        take: Allocate = take_memory,
    ) -> None:
        if rows < 1 or positions < 1:
            raise SettingError(
                "a quantised static cache needs at least one row and one position, not "
                f"max_batch_size={rows} and max_cache_len={positions}"
            )
        self.max_batch_size, self.max_cache_len = rows, positions
        fit, room = config.find_backend().find_fit(), Room(positions, rows, take)
        self._hold(config, PackedStore(config, fit, room, windows, is_linked=take is take_linked))
        sizes.open(self._store, rows)

    def take_rows(self, index: Sequence[int]) -> Self:
        return StoredCache.take_rows(self, index)

    def _pack(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        facts, tensors = super()._pack()
        return {**facts, "max_cache_len": self.max_cache_len}, tensors

    @classmethod
    def _make_like(cls, config: QuantizedCacheConfig, facts: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Self:
        rows, sizes = _read_saved(facts, tensors)
        room, places = int(facts["max_cache_len"]), tensors["0.0"].shape[2]
        if room > places + config.residual_length:
            raise ValueError(f"max_cache_len={room} is more than the buffers hold")
        return cls(config, sizes.as_config(), rows, room, sizes.devices[0], sizes.dtype)

    def batch_split(self, full_batch_size: int, split_size: int) -> list[Self]:
        raise SettingError("the rows of a static cache stay together; use a quantised cache that grows")


class QuantizedHybridCache(QuantizedStaticCache):
    """A quantised cache for models some of whose layers slide (Gemma 2 and 3), or all (Mistral).

    Memory is taken once, by `allocate` if one is given: all layers can lie in mapped files.
    """

    can = frozenset({TRIAL, SELECT_ROWS, RAGGED, FIXED_SHAPE, JOIN})

    def __init__(
        self,
        cache_config: QuantizedCacheConfig,
        config: Any,
        max_batch_size: int,
        max_cache_len: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
        *,
        allocate: Allocate | None = None,
    ) -> None:
        self.kinds, window = tuple(read_kinds(config)), read_window(config)
        if window is None and "sliding" in self.kinds:
            raise SettingError(
                "the config names sliding layers and no sliding_window; give it one, or use a QuantizedStaticCache"
            )
        self.window = window if window is not None else max_cache_len
        windows = [self.window if kind == "sliding" else None for kind in self.kinds]
        sizes = read_sizes(config, device, dtype)
        self._take_all(cache_config, sizes, max_batch_size, max_cache_len, windows, allocate or take_memory)

    @property
    def room(self) -> int | None:
        """The most positions that a row can get; None if every layer slides."""
        return self.max_cache_len if "full" in self.kinds else None

    # --- files ---------------------------------------------------------------------------------------
    def _pack(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        facts, tensors = super()._pack()
        return {**facts, "kinds": list(self.kinds), "window": self.window}, tensors

    @classmethod
    def _make_like(cls, config: QuantizedCacheConfig, facts: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Self:
        rows, sizes = _read_saved(facts, tensors)
        kinds, window, room = list(facts["kinds"]), int(facts["window"]), int(facts["max_cache_len"])
        if len(kinds) != len(sizes.devices) or not set(kinds) <= {"full", "sliding"} or not 0 < window <= 2**24:
            raise ValueError(f"{len(sizes.devices)} layers of kinds {kinds[:8]} with a window of {window}")
        # Nothing is taken that the file does not hold: every layer must have the room that it says.
        for layer, kind in enumerate(kinds):
            most = tensors[f"{layer}.0"].shape[2] + config.residual_length
            if (room if kind == "full" else min(window, room if "full" in kinds else window)) > most:
                raise ValueError(f"layer {layer} does not hold what max_cache_len={room} and its window say")
        layer_types = [f"{kind}_attention" for kind in kinds]
        named = sizes.as_config(sliding_window=window, layer_types=layer_types)
        return cls(config, named, rows, room, sizes.devices[0], sizes.dtype)


def _read_saved(facts: dict[str, Any], tensors: dict[str, torch.Tensor]) -> tuple[int, KeySizes]:
    """The rows and sizes that a file says of its layers."""
    recent = list_recent(facts, tensors)
    rows, _, _, heads, width = recent[0].shape
    return rows, KeySizes(heads, width, recent[0].dtype, (recent[0].device,) * len(recent))
