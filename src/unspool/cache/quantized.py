"""Caches in few bits: old positions packed in blocks, recent ones in full precision (KIVI, Liu et al., 2024).

A block is `q_group_size` positions. It is packed when at least `residual_length` positions come after it, once the
pass that wrote them has ended: so a pass sees its own tokens as they are, and nothing is packed during a trial.
Rolling back into a packed block unpacks what stays of it; packed again, a number may be off by another half step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import is_
from typing import Any, Final, Self

import torch

from unspool.cache.base import FIXED_SHAPE, RAGGED, ROLL_BACK, SELECT_ROWS, TRIAL, Cache, Span, Stores
from unspool.cache.packed_store import PackedStore, settle_together
from unspool.cache.places import Landing, PackedPlaces, Places
from unspool.cache.quantized_config import QuantizedCacheConfig
from unspool.cache.stores import join
from unspool.errors import SettingError
from unspool.kernels.packed import PackedView
from unspool.kernels.packing import fit_range

STEP_ROOM: Final = 16  # new positions that a step may bring without a detour
_CHUNK: Final = 256  # positions by which packed buffers grow, at least
_SHARE: Final = 32  # … or this part of what they hold, so that long texts do not copy them ever again


class QuantizedCache(Cache):
    """A cache that packs what is no longer recent, with unspool's own quantiser."""

    can = frozenset({ROLL_BACK, TRIAL, SELECT_ROWS, RAGGED})
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
        self._filled: list[int] = []  # positions held, a layer each (they differ only amid update() calls)
        self._places = self._round_up(max(0, (capacity or 0) - self.residual_length))
        self._slots = self.residual_length + self.q_group_size + STEP_ROOM
        self._is_trial = False
        self._view: PackedView | None = None
        self._told: tuple[list[int], torch.Tensor] | None = None
        self._known_places: Places | None = None
        self._told_stores: Stores | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_told_stores": None}  # addresses are not a copy's

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
        keys, values = recent.unbind(2)
        return keys.transpose(1, 2), values.transpose(1, 2)

    def end(self) -> None:
        super().end()
        if not self._is_trial:
            self._settle()
        self._note_filled()

    def _note_filled(self) -> None:
        self._filled = [max(self.lengths, default=0)] * len(self._stores)

    def _settle(self) -> None:
        if self._stores and not self._stores[0].is_overdue(self.lengths):
            return  # layers are alike
        for store in self._stores:
            store.settle(self.lengths)

    def holds_buffers(self, num_layers: int) -> bool:
        return len(self._stores) == num_layers

    # --- the CPU library -----------------------------------------------------------------------------
    def find_stores(self, num_layers: int, rows: int, heads: int, width: int, dtype: torch.dtype) -> Stores | None:
        """What is packed as shared keys, and what is recent as a row's own; None for a pass that is longer than those
        have room for: it is read as it came, and packed on its way."""
        span = self._require_span()
        for layer in range(len(self._stores), num_layers):
            self._add_store(layer, torch.zeros(1, dtype=dtype).expand(rows, 1, 2, heads, width))
        firsts = self._first_recent()
        if len(self._stores) != num_layers or len(firsts) != rows:
            return None
        needed = max(start - first for start, first in zip(span.starts, firsts, strict=True)) + span.num_new
        first = self._stores[0].recent
        if first.shape[0] < rows or first.shape[1] < needed or first.shape[2:] != (2, heads, width):
            return None
        if first.dtype != dtype or first.device.type != "cpu":
            return None
        told = self._told_stores
        if told is None or told.shared_counts != firsts or not self._still_holds(told):
            told = self._told_stores = self._tell_stores(firsts)
        return told

    def _still_holds(self, told: Stores) -> bool:
        """Whether nothing has moved since stores were told."""
        assert told.packed is not None
        return all(map(is_, told.own, [store.recent for store in self._stores])) and all(
            keys is store.keys and values is store.values
            for (keys, values), store in zip(told.packed, self._stores, strict=True)
        )

    def _tell_stores(self, firsts: list[int]) -> Stores | None:
        stores, first = self._stores, self._stores[0].recent
        for store in stores:
            recent = store.recent
            if recent.shape != first.shape or recent.dtype != first.dtype or store.first_recent != firsts:
                return None
            if not all(tensor.is_contiguous() and tensor.device.type == "cpu" for tensor in store.tensors()):
                return None
        packed = [(store.keys, store.values) for store in stores]
        return Stores([store.recent for store in stores], None, list(range(len(firsts))), list(firsts), packed=packed)

    @property
    def longest_stretch(self) -> int | None:
        if self._is_trial or not self._stores or not self.lengths:
            return STEP_ROOM
        return min(STEP_ROOM, self._stores[0].count_steps(self.lengths))

    # --- a captured step -----------------------------------------------------------------------------
    def places(self) -> Places | None:
        stores = self._stores
        known = self._known_places
        if (
            known is not None
            and known.packed is not None
            and known.packed.num_packed == stores[0].num_packed
            and all(map(is_, known.buffers, [store.recent for store in stores]))
            and all(layer[0] is store.keys.codes for layer, store in zip(known.packed.layers, stores, strict=True))
        ):
            return known
        if not stores:
            return Places([])
        first = stores[0]
        layers: list[tuple[torch.Tensor, ...]] = [(*store.keys.tensors(), *store.values.tensors()) for store in stores]
        packed = PackedPlaces(layers, (first.keys.scheme, first.values.scheme), self._places, list(first.num_packed))
        landing = known.landing if known is not None else None
        if landing is None or any(home[0] is not layer[0] for home, layer in zip(landing.homes, layers, strict=True)):
            landing = self._make_landing(packed)
        self._known_places = Places([store.recent for store in stores], packed=packed, landing=landing)
        return self._known_places

    def _make_landing(self, packed: PackedPlaces) -> Landing | None:  # noqa: ARG002 - for kinds whose blocks are away
        """Where captured steps bring what is packed before they read it; None where they read it as it lies."""
        return None

    def advance(self, rows: int) -> None:
        starts = self._find_starts(rows)
        self._settle_steps()
        self._reserve(max(starts) + 1)
        self.lengths = [start + 1 for start in starts]
        self._note_filled()

    def _settle_steps(self) -> None:
        """Pack what captured steps left behind: they write by address, and nobody ends them."""
        if self.lengths and not self._is_trial and self._stores and self._stores[0].is_overdue(self.lengths):
            settle_together(self._stores, self.lengths)

    def _reserve(self, stop: int) -> None:
        places = self._round_down(max(0, stop - self.residual_length))
        if places > self._places:
            self._told_stores = None  # or it would keep the old ones
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
        self._filled.append(0)

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
        self._note_filled()

    def _select(self, index: torch.Tensor) -> None:
        self._told_stores = None  # or it would keep the old ones
        for store in self._stores:
            store.select(index, is_fixed=FIXED_SHAPE in self.can)

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
        cache._note_filled()
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
    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        cache_kwargs: dict[str, Any] | None = None,  # noqa: ARG002 - the reference's argument; positions follow
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append to one layer; return all its keys and values, unpacked."""
        rows, _, num_new, _ = key_states.shape
        self._check_update(rows)
        held = self._filled[layer_idx] if layer_idx < len(self._filled) else 0
        stop = held + num_new
        self._reserve(stop)
        kv = join(key_states, value_states)
        if layer_idx >= len(self._stores):
            self._add_store(layer_idx, kv)
        positions = torch.arange(held, stop, device=kv.device).expand(rows, num_new)
        span = Span([held] * rows, num_new, [num_new] * rows, stop, True, positions)
        store = self._stores[layer_idx]
        recent = store.write(span, kv)
        read = self._read_layer(store, recent, positions, stop)
        store.settle([stop] * rows)
        self._filled[layer_idx] = stop
        self.lengths = [self._filled[0]] * rows
        return read

    def _read_layer(
        self, store: PackedStore, recent: torch.Tensor, positions: torch.Tensor, stop: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        counts = torch.tensor(store.num_packed, dtype=torch.int32, device=recent.device)
        view = PackedView(list(store.num_packed), counts, positions, max(store.num_packed))
        keys, values = store.show(recent, view)
        kept = stop - min(store.bases)
        return keys.unpack(kept), values.unpack(kept)

    def get_seq_length(self, layer_idx: int | None = 0) -> int:
        layer = layer_idx or 0
        return self._filled[layer] if layer < len(self._filled) else 0

    def __len__(self) -> int:
        return len(self._stores)

    def __getitem__(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's keys and values, unpacked: (rows, heads, positions, width)."""
        if not 0 <= layer_idx < len(self):
            raise KeyError(f"the cache has {len(self)} layers; layer {layer_idx} was asked for")
        store, stop = self._stores[layer_idx], self._filled[layer_idx]
        rows = len(self.lengths)
        num_slots = stop - min(store.first_recent, default=0)
        positions = torch.zeros(rows, 0, dtype=torch.int64, device=store.recent.device)
        return self._read_layer(store, store.recent[:rows, :num_slots], positions, stop)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return (self[layer] for layer in range(len(self)))

    @property
    def key_cache(self) -> list[torch.Tensor]:
        """The keys held, unpacked, a layer each: (rows, heads, positions, width)."""
        return [keys for keys, _ in self]

    @property
    def value_cache(self) -> list[torch.Tensor]:
        """The values held, unpacked, a layer each: (rows, heads, positions, width)."""
        return [values for _, values in self]

    def crop(self, max_length: int) -> None:
        """Keep the first `max_length` positions; a negative number removes as many from the end."""
        held = self.get_seq_length()
        keep = max_length if max_length >= 0 else held + max_length
        if keep < 0:
            raise SettingError(f"crop({max_length}) asks for more than the {held} positions held")
        self.truncate([min(keep, length) for length in self.lengths])

    def to_legacy_cache(self) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
        """Keys and values, unpacked, as a tuple of pairs, a layer each."""
        if len(set(self.lengths)) > 1:
            raise SettingError(
                f"the rows hold {self.lengths} positions, and tuples of tensors can't say so; keep the cache itself"
            )
        return tuple(self)

    @classmethod
    def from_legacy_cache(
        cls,
        past_key_values: Sequence[tuple[torch.Tensor, torch.Tensor]] | None = None,
        cache_config: QuantizedCacheConfig | None = None,
    ) -> Self:
        """A cache that packs a tuple of (keys, values) pairs."""
        cache = cls(cache_config or QuantizedCacheConfig(backend=cls.backend or "unspool"))
        for layer, (keys, values) in enumerate(past_key_values or ()):
            cache.update(keys, values, layer)
        return cache

    def batch_split(self, full_batch_size: int, split_size: int) -> list[Self]:
        """One cache for every `split_size` rows."""
        return [
            self._copy_of(list(range(first, min(first + split_size, full_batch_size))))
            for first in range(0, full_batch_size, split_size)
        ]

    @classmethod
    def from_batch_splits(cls, splits: Sequence[Self]) -> Self:
        """One cache with the rows of all the given ones."""
        whole = splits[0]._copy_of(list(range(len(splits[0].lengths))))
        for part in splits[1:]:
            whole._join(part)
        return whole

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        self.select_rows([row for row in range(len(self.lengths)) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only the given rows."""
        self.select_rows([int(i) for i in indices])

    def _copy_of(self, rows: list[int]) -> Self:
        part = type(self)(self.cache_config)
        part._places, part._slots = self._places, self._slots
        part._stores = [store.copy_of(rows) for store in self._stores]
        part.lengths = [self.lengths[row] for row in rows]
        part._note_filled()
        return part

    def _join(self, part: QuantizedCache) -> None:
        self._places = max(self._places, part._places)
        slots = max(store.recent.shape[1] for store in (*self._stores, *part._stores))
        for mine, theirs in zip(self._stores, part._stores, strict=True):
            mine.reserve(self._places, slots)
            mine.join(theirs)
        self.lengths = [*self.lengths, *part.lengths]
        self._note_filled()


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
