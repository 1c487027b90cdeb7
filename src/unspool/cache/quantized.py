"""Caches in few bits: old positions packed in blocks, recent ones in full precision (KIVI, Liu et al., 2024).

A block is `q_group_size` positions. It is packed when at least `residual_length` positions come after it, once the
pass that wrote them has ended: so a pass sees its own tokens as they are, and nothing is packed during a trial.
Rolling back into a packed block unpacks what stays of it; packed again, a number may be off by another half step.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any, Final, Self

import torch

from unspool.cache.base import FIXED_SHAPE, JOIN, RAGGED, ROLL_BACK, SELECT_ROWS, TRIAL, Cache
from unspool.cache.places import Landing, PackedPlaces, Places
from unspool.cache.reference import GrowingSurface
from unspool.cache.span import Span
from unspool.cache.stores.layout import split
from unspool.cache.stores.packed import PackedStore, settle_together
from unspool.cache.stores.quantized_config import QuantizedCacheConfig
from unspool.errors import SettingError
from unspool.kernels.packed import PackedView
from unspool.kernels.packing import fit_range

STEP_ROOM: Final = 16  # new positions that a step may bring without a detour
_CHUNK: Final = 256  # positions by which packed buffers grow, at least
_SHARE: Final = 32  # … or this part of what they hold, so that long texts do not copy them ever again


class QuantizedCache(Cache, GrowingSurface):
    """A cache that packs what is no longer recent, with unspool's own quantiser."""

    can = frozenset({ROLL_BACK, TRIAL, SELECT_ROWS, RAGGED, JOIN})
    rolls_back_exactly = False
    backend: str | None = None  # the one a kind stands for; None: the config's, packed by unspool itself

    def __init__(self, cache_config: QuantizedCacheConfig, *, capacity: int | None = None) -> None:
        super().__init__()
        config = cache_config
        if self.backend is not None and config.backend != self.backend:
            config = QuantizedCacheConfig(**{**config.to_dict(), "backend": self.backend})
        backend = config.find_backend()
        self.cache_config = config
        self.nbits, self.q_group_size, self.residual_length = config.nbits, config.q_group_size, config.residual_length
        self.axis_key, self.axis_value = config.axis_key, config.axis_value
        self.compute_dtype, self.device = config.compute_dtype, config.device
        self._fit = backend.find_fit() if self.backend is not None else fit_range
        self._stores: list[PackedStore] = []
        self._places = self._round_up(max(0, (capacity or 0) - self.residual_length))
        self._slots = self.residual_length + self.q_group_size + STEP_ROOM
        self._is_trial = False
        self._view: PackedView | None = None
        self._told: tuple[list[int], torch.Tensor] | None = None
        self._known_places: Places | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_known_places": None}  # addresses are not a copy's

    # --- a forward pass ------------------------------------------------------------------------------
    def begin(
        self,
        rows: int,
        num_new: int,
        counts: Sequence[int] | None = None,
        device: torch.device | str = "cpu",
    ) -> Span:
        self._settle_steps()
        span = super().begin(rows, num_new, counts, device)
        for store in self._stores:
            store.forget_pass()
        self._view = None
        self._look(span)
        return span

    def _look(self, span: Span) -> None:
        """Work out once what all layers of a pass read alike."""
        packed = self._first_recent()
        if any(packed):
            counts = self._tell(packed, span.positions.device)
            self._view = PackedView(list(packed), counts, span.positions, max(packed))

    def _first_recent(self) -> list[int]:
        """The first position that is not packed, a row each; empty until there is a layer."""
        return self._stores[0].first_recent if self._stores else []

    def _count_slots(self, stop: int) -> int:
        """What is not packed once a pass up to `stop` has been written, of the row that has the most of it."""
        if not self.lengths:
            return stop
        held = max(length - first for length, first in zip(self.lengths, self._first_recent(), strict=True))
        return held + stop - max(self.lengths)

    def _view_of(self, layer: int) -> PackedView | None:  # noqa: ARG002 - one for all, where layers are alike
        """What a layer's queries look through; None while nothing is packed."""
        return self._view

    def _tell(self, packed: list[int], device: torch.device) -> torch.Tensor:
        """How much of each row is packed, on the device: (rows,) int32. It changes once a block, not once a step."""
        if self._told is None or self._told[0] != packed or self._told[1].device != device:
            self._told = (list(packed), torch.tensor(packed, dtype=torch.int32, device=device))
        return self._told[1]

    @property
    def sees_by_position(self) -> bool:  # type: ignore[override]  # it depends on the pass
        return self._view is not None

    def write(self, layer: int, kv: torch.Tensor) -> tuple[Any, Any]:
        """Store keys and values; return both as `PackedKeys`, or as plain tensors while nothing is packed."""
        span = self._require_span()
        if layer >= len(self._stores):
            self._add_store(layer, kv)
        store = self._stores[layer]
        recent = store.write(span, kv)
        view = self._view_of(layer)
        if view is not None:
            return store.show(recent, view)
        return split(recent)

    def end(self) -> None:
        super().end()
        if not self._is_trial:
            self._settle()

    def _settle(self) -> None:
        if self._stores and not self._stores[0].is_overdue(self.lengths):
            return  # layers are alike
        for store in self._stores:
            store.settle(self.lengths)

    # --- passes by address ---------------------------------------------------------------------------
    def open_layers(self, num_layers: int, rows: int, heads: int, width: int, dtype: torch.dtype) -> None:
        for layer in range(len(self._stores), num_layers):
            self._add_store(layer, torch.zeros(1, dtype=dtype).expand(rows, 1, 2, heads, width))

    @property
    def longest_stretch(self) -> int | None:
        if self._is_trial or not self._stores or not self.lengths:
            return STEP_ROOM
        return min(STEP_ROOM, self._stores[0].count_steps(self.lengths))

    def places(self, *, in_order: bool = False) -> Places | None:  # noqa: ARG002 - they always are
        stores, known = self._stores, self._known_places
        if not stores:
            return Places([])
        counts, bases = self._first_recent(), self._find_bases()
        if (
            known is not None
            and known.packed is not None
            and known.packed.num_packed == counts
            and known.packed.bases == bases
            and all(map(is_, known.buffers, [store.recent for store in stores]))
            and all(layer[0] is store.keys.codes for layer, store in zip(known.packed.layers, stores, strict=True))
        ):
            return known
        first = stores[0]
        layers: list[tuple[torch.Tensor, ...]] = [(*store.keys.tensors(), *store.values.tensors()) for store in stores]
        schemes, sliding = (first.keys.scheme, first.values.scheme), self._find_sliding()
        packed = PackedPlaces(layers, schemes, self._places, list(counts), sliding, bases)
        landing = known.landing if known is not None else None
        if landing is None or any(home[0] is not layer[0] for home, layer in zip(landing.homes, layers, strict=True)):
            landing = self._make_landing(packed)
        self._known_places = Places([store.recent for store in stores], packed=packed, landing=landing)
        return self._known_places

    def _find_sliding(self) -> list[bool] | None:
        """Which layers hold a window alone; None: none do."""
        return None

    def _find_bases(self) -> list[int] | None:
        """The position that place 0 of those stands for, one per row."""
        return None

    def _make_landing(self, packed: PackedPlaces) -> Landing | None:  # noqa: ARG002 - for kinds whose blocks are away
        """Where captured steps bring what is packed before they read it; None where they read it as it lies."""
        return None

    def advance(self, rows: int) -> None:
        self._settle_steps()
        super().advance(rows)

    def _settle_steps(self) -> None:
        """Pack what captured steps left behind: they write by address, and nobody ends them."""
        if self.lengths and not self._is_trial and self._stores and self._stores[0].is_overdue(self.lengths):
            settle_together(self._stores, self.lengths)

    def _reserve(self, stop: int) -> None:
        places = self._round_down(max(0, stop - self.residual_length))
        if places > self._places:
            self._known_places = None  # or it would keep the old ones
            self._places = self._round_up(max(places, self._places + max(_CHUNK, self._places // _SHARE)))
        slots = self._slots
        if self._is_trial and self._stores:  # nothing is packed, so everything new is recent
            slots = max(slots, self._count_slots(stop))
        for store in self._stores:
            store.reserve(self._places, slots)

    def _add_store(self, layer: int, kv: torch.Tensor) -> None:
        if layer != len(self._stores):
            raise SettingError(f"layer {layer} is written before layer {len(self._stores)}")
        self._check_device(kv.device)
        rows, _, _, heads, width = kv.shape
        recent = torch.zeros(rows, self._slots, 2, heads, width, dtype=kv.dtype, device=kv.device)
        schemes = self.cache_config.make_schemes(width)
        self._stores.append(PackedStore(schemes, self._fit, self.residual_length, self._places, recent))

    def _check_device(self, device: torch.device) -> None:
        asked = torch.device(self.device)
        if asked.type not in ("cpu", device.type):
            raise SettingError(
                f"the cache was made for device={self.device!r} and the keys are on {device}; leave `device` out, "
                "blocks are packed where the keys are"
            )

    def _round_up(self, positions: int) -> int:
        return -(-positions // self.q_group_size) * self.q_group_size

    def _round_down(self, positions: int) -> int:
        return positions // self.q_group_size * self.q_group_size

    # --- rows ----------------------------------------------------------------------------------------
    def begin_trial(self) -> None:
        self._settle_steps()
        self._is_trial = True

    def truncate(self, lengths: Sequence[int]) -> None:
        super().truncate(lengths)
        self._roll_stores_back()

    def _roll_stores_back(self) -> None:
        """Let the stores follow lengths that were lowered; that ends a trial."""
        self._is_trial = False
        for store in self._stores:
            store.truncate(self.lengths)
            store.settle(self.lengths)  # what a trial kept back

    def _select(self, index: torch.Tensor) -> None:
        self._known_places = None  # or it would keep the old ones
        for store in self._stores:
            store.select(index, is_fixed=FIXED_SHAPE in self.can)

    @property
    def is_trying(self) -> bool:
        return self._is_trial

    def take_rows(self, index: Sequence[int]) -> Self:
        self.require(JOIN)
        if FIXED_SHAPE in self.can:
            return super().take_rows(index)
        self._settle_steps()
        part = type(self)(self.cache_config)
        part._places, part._slots = self._places, self._slots
        part._stores = [store.copy_of(index) for store in self._stores]
        part.lengths = [self.lengths[row] for row in index]
        return part

    def _join(self, other: QuantizedCache) -> None:
        if other.cache_config != self.cache_config:
            raise SettingError("rows that are packed in another way can't join; make both caches with one cache_config")
        self._settle_steps()
        other._settle_steps()
        self._known_places = None  # or it would keep the old ones
        if not self._stores:
            self._stores = [store.copy_of(range(len(other.lengths))) for store in other._stores]
            self._places, self._slots = other._places, other._slots
            return
        self._places = max(self._places, other._places)
        slots = max(store.recent.shape[1] for store in (*self._stores, *other._stores))
        for mine, theirs in zip(self._stores, other._stores, strict=True):
            mine.reserve(self._places, slots)
            mine.join(theirs, len(self.lengths), len(other.lengths))

    @property
    def nbytes(self) -> int:
        """Bytes of packed blocks, their scales, and recent positions."""
        return sum(store.nbytes for store in self._stores)

    # --- copies and files ----------------------------------------------------------------------------
    def _shared(self) -> list[Any]:
        return [self._fit]

    def _held_tensors(self) -> list[torch.Tensor]:
        return [store.recent for store in self._stores]

    def _pack(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        facts = {
            "config": {**self.cache_config.to_dict(), "compute_dtype": str(self.compute_dtype)},
            "num_packed": [store.num_packed for store in self._stores],
            "bases": [store.bases for store in self._stores],
            "num_layers": len(self._stores),
        }
        tensors = {
            f"{layer}.{place}": tensor
            for layer, store in enumerate(self._stores)
            for place, tensor in enumerate(store.tensors())
        }
        return facts, tensors

    @classmethod
    def _unpack(cls, facts: dict[str, Any], tensors: dict[str, torch.Tensor], lengths: list[int]) -> Cache:
        recent = [tensors[f"{layer}.{len(tensors) // facts['num_layers'] - 1}"] for layer in range(facts["num_layers"])]
        cache = cls._make_like(QuantizedCacheConfig(**facts["config"]), facts, recent, tensors)
        cache.lengths = lengths
        counts = zip(cache._stores, facts["num_packed"], facts["bases"], strict=True)
        for layer, (store, packed, bases) in enumerate(counts):
            store.fill([tensors[f"{layer}.{place}"] for place in range(len(store.tensors()))], packed, bases, lengths)
        return cache

    @classmethod
    def _make_like(
        cls,
        config: QuantizedCacheConfig,
        facts: dict[str, Any],  # noqa: ARG003 - static caches read their size there
        recent: list[torch.Tensor],
        tensors: dict[str, torch.Tensor],
    ) -> Self:
        """An empty cache with stores of the shapes that were saved."""
        cache = cls(config)
        if recent:
            cache._places, cache._slots = tensors["0.0"].shape[2], recent[0].shape[1]
        for layer, held in enumerate(recent):
            cache._add_store(layer, held)
        return cache

    # --- the reference's surface ---------------------------------------------------------------------
    def _append(self, layer: int, span: Span, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values of the layer are returned, unpacked."""
        if layer >= len(self._stores):
            self._add_store(layer, kv)
        store = self._stores[layer]
        recent = store.write(span, kv)
        read = self._read_layer(store, recent, span.positions, span.stop)
        store.settle([span.stop] * len(span.starts))
        return read

    def _read_layer(
        self, store: PackedStore, recent: torch.Tensor, positions: torch.Tensor, stop: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        counts = torch.tensor(store.num_packed, dtype=torch.int32, device=recent.device)
        view = PackedView(list(store.num_packed), counts, positions, max(store.num_packed))
        keys, values = store.show(recent, view)
        kept = stop - min(store.bases)
        return keys.unpack(kept), values.unpack(kept)

    def _show(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        store, stop, rows = self._stores[layer], self.get_seq_length(layer), len(self.lengths)
        num_slots = stop - min(store.first_recent, default=0)
        positions = torch.zeros(rows, 0, dtype=torch.int64, device=store.recent.device)
        return self._read_layer(store, store.recent[:rows, :num_slots], positions, stop)

    def __len__(self) -> int:
        return len(self._stores)

    @classmethod
    def from_legacy_cache(
        cls,
        past_key_values: Sequence[tuple[torch.Tensor, torch.Tensor]] | None = None,
        cache_config: QuantizedCacheConfig | None = None,
    ) -> Self:
        """A cache that packs a tuple of (keys, values) pairs."""
        return cls(cache_config or QuantizedCacheConfig(backend=cls.backend or "unspool"))._take_legacy(past_key_values)


class QuantoQuantizedCache(QuantizedCache):
    """A cache in 2 or 4 bits as optimum-quanto fits them, where it is installed; as unspool does, where not."""

    backend = "quanto"


class HQQQuantizedCache(QuantizedCache):
    """A cache in 2, 4 or 8 bits as hqq fits them, where it is installed; as unspool does, where not."""

    backend = "HQQ"


QUANTIZED_CACHES: Final[dict[str, type[QuantizedCache]]] = {
    "unspool": QuantizedCache,
    "quanto": QuantoQuantizedCache,
    "HQQ": HQQQuantizedCache,
}
