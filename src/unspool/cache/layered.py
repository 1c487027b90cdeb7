"""A cache of layers that need not hold their keys alike: a store each, full ones beside rings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch

from unspool.cache.base import FIXED_SHAPE, JOIN, RAGGED, SELECT_ROWS, TRIAL, Cache
from unspool.cache.files import check_room
from unspool.cache.places import Places
from unspool.cache.span import Mask, Span
from unspool.cache.stores.layout import split
from unspool.cache.stores.plain import Allocate, PlainStore, RingStore, Store, take_memory
from unspool.cache.stores.ring import Ring, Trial
from unspool.errors import SettingError, UnsupportedError


@dataclass(frozen=True, slots=True)
class Room:
    """What a cache of fixed size takes its memory for."""

    rows: int
    positions: int  # of full layers; a ring takes its window, where that is less
    heads: int
    width: int
    dtype: torch.dtype
    devices: tuple[torch.device, ...]  # a layer each


class LayeredCache(Cache):
    """A cache whose layers are full or sliding: sliding ones hold a window's keys in a ring."""

    can = frozenset({TRIAL, SELECT_ROWS, RAGGED, FIXED_SHAPE, JOIN})
    is_compileable = True
    takes_positions = True

    def __init__(self, kinds: Sequence[str], window: int, room: Room, allocate: Allocate = take_memory) -> None:
        super().__init__()
        self.max_batch_size = room.rows
        self.max_cache_len = room.positions
        self.kinds = tuple(kinds)
        self.window = window
        self._ring = Ring(min(window, room.positions))
        # A window that was given less than its size can't forget, so it ends where it is full.
        self._is_bounded = "full" in self.kinds or self._ring.size < window
        self._stores: list[Store] = []
        for kind, device in zip(self.kinds, room.devices, strict=True):
            places = self._ring.size if kind == "sliding" else room.positions
            buffer = allocate((room.rows, places, 2, room.heads, room.width), room.dtype, device)
            self._stores.append(RingStore(self._ring, buffer) if kind == "sliding" else PlainStore(buffer))
        self._known_places: Places | None = None

    @property
    def room(self) -> int | None:
        """The most positions that a row can get; None where it can go on for ever."""
        return self.max_cache_len if self._is_bounded else None

    # --- a forward pass ------------------------------------------------------------------------------
    def begin(
        self,
        rows: int,
        num_new: int,
        counts: Sequence[int] | None = None,
        device: torch.device | str = "cpu",
    ) -> Span:
        span = super().begin(rows, num_new, counts, device)
        self._ring.begin(span)
        return span

    def write(self, layer: int, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._stores[layer].write(self._require_span(), kv)

    def _reserve(self, stop: int) -> None:
        if self._is_bounded and stop > self.max_cache_len:
            raise SettingError(
                f"position {stop} does not fit a {type(self).__name__} of {self.max_cache_len} positions; "
                "make it larger (max_cache_len) or use cache_implementation='dynamic'"
            )

    def _check_rows(self, rows: int) -> None:
        self._check_batch(rows, self.max_batch_size, "dynamic")

    # --- a captured step -----------------------------------------------------------------------------
    def places(self, *, in_order: bool = False) -> Places | None:  # noqa: ARG002 - they always are
        """None during a trial, which keeps what its passes write over."""
        if self._ring.trial is not None:
            return None
        buffers, known = [store.buffer for store in self._stores], self._known_places
        if known is None or not all(map(is_, known.buffers, buffers)):
            self._known_places = known = Places(buffers, rooms=[buffer.shape[1] for buffer in buffers])
        return known

    @property
    def longest_stretch(self) -> int | None:
        """Until a ring writes over keys: what is taken too much must leave all others as they were."""
        return max(1, self._ring.size - max(self.lengths, default=0)) if "sliding" in self.kinds else None

    # --- what is in view -----------------------------------------------------------------------------
    def stands_in_order(self, window: int | None) -> bool:
        return window is None

    def mask(self, span: Span, window: int | None = None) -> Mask:
        if window is None:
            self._require_kind("full")
            return super().mask(span)
        self._require_kind("sliding")
        if window > self._ring.size and span.stop > self._ring.size:
            raise UnsupportedError(
                f"the model's layers see {window} keys back and this cache keeps {self._ring.size}; "
                "make it from the model's own config"
            )
        return self._ring.mask(span, window)

    def key_positions(self, span: Span, window: int | None = None) -> torch.Tensor:
        return super().key_positions(span) if window is None else self._ring.key_positions(span).clamp(min=0)

    def _require_kind(self, kind: str) -> None:
        if kind not in self.kinds:
            raise UnsupportedError(
                f"the model has {kind} layers and this {type(self).__name__} has none; make it from the model's own "
                "config, or use cache_implementation='hybrid' or 'dynamic'"
            )

    # --- rows ----------------------------------------------------------------------------------------
    def begin_trial(self) -> None:
        self._ring.trial = Trial(list(self.lengths), [])
        for store in self._ring_stores():
            store.tried = []

    def truncate(self, lengths: Sequence[int]) -> None:
        self._check_lengths(lengths)
        self._ring.check_truncation(self.lengths, lengths)
        if self._ring.trial is not None:
            for store in self._ring_stores():
                store.restore(torch.tensor(list(lengths), device=store.buffer.device)[:, None])
                store.tried = []
            self._ring.trial = None
        self.lengths = list(lengths)

    def _ring_stores(self) -> Iterator[RingStore]:
        return (store for store in self._stores if isinstance(store, RingStore))

    def _select(self, index: torch.Tensor) -> None:
        self._check_rows(len(index))
        held = max(self.lengths, default=0)
        for store in self._stores:
            store.select(index, held)
        self._ring.select(index)

    @property
    def is_trying(self) -> bool:
        return self._ring.trial is not None

    def _join(self, other: LayeredCache) -> None:
        if other.kinds != self.kinds or other._ring.size != self._ring.size:
            raise SettingError(
                f"rows of windows of {other._ring.size} positions can't join those of {self._ring.size}; "
                "make both caches for the same model and the same number of positions"
            )
        mine, rows = len(self.lengths), len(other.lengths)
        self._reserve(max(other.lengths))
        for store, given in zip(self._stores, other._stores, strict=True):
            held = min(max(other.lengths), given.buffer.shape[1])
            store.buffer[mine : mine + rows, :held] = given.buffer[:rows, :held]

    @property
    def nbytes(self) -> int:
        """Bytes that keys and values take."""
        return sum(store.nbytes for store in self._stores)

    # --- copies and files ----------------------------------------------------------------------------
    def _held_tensors(self) -> list[torch.Tensor]:
        return [store.buffer for store in self._stores]

    def find_misfit(self, shape: Any) -> str | None:
        return find_layer_misfit(self.kinds, self.window, shape) or super().find_misfit(shape)

    def _pack(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        heads, width = self._stores[0].buffer.shape[-2:]
        facts = {
            "kinds": list(self.kinds),
            "window": self.window,
            "rows": self.max_batch_size,
            "positions": self.max_cache_len,
            "heads": heads,
            "width": width,
        }
        held = max(self.lengths, default=0)
        return facts, {
            f"layer.{layer}": store.buffer[: len(self.lengths), : min(held, store.buffer.shape[1])]
            for layer, store in enumerate(self._stores)
        }

    @classmethod
    def _unpack(cls, facts: dict[str, Any], tensors: dict[str, torch.Tensor], lengths: list[int]) -> LayeredCache:
        kinds, like = [str(kind) for kind in facts["kinds"]], tensors["layer.0"]
        rows, positions, window, heads, width = (
            int(facts[name]) for name in ("rows", "positions", "window", "heads", "width")
        )
        if not 0 < rows <= 2**20 or not 0 < positions <= 2**24 or window < 1 or len(kinds) != len(tensors):
            raise ValueError(f"{rows} rows of {positions} positions, window {window}, {len(kinds)} layers")
        if heads < 1 or width < 1:
            raise ValueError(f"{heads} heads of width {width} can't be")
        check_room(len(kinds) * rows * positions * 2 * heads * width * like.element_size(), tensors)
        room = Room(rows, positions, heads, width, like.dtype, (like.device,) * len(kinds))
        cache = cls.__new__(cls)
        LayeredCache.__init__(cache, kinds, window, room)
        for layer, store in enumerate(cache._stores):
            held = tensors[f"layer.{layer}"]
            store.buffer[: len(lengths), : held.shape[1]] = held
        cache.lengths = lengths
        return cache

    # --- the reference's surface ---------------------------------------------------------------------
    def _append(self, layer: int, span: Span, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The buffers are returned, oldest position first; a prompt longer than a window is returned whole."""
        store = self._stores[layer]
        if isinstance(store, RingStore):
            self._ring.begin(span)
        store.write(span, kv.to(store.buffer.dtype))
        if isinstance(store, RingStore) and span.num_new > self._ring.size:
            return split(kv)
        return split(store.read(len(span.starts), span.stop))

    def _show(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = len(self.lengths) or self.max_batch_size
        return split(self._stores[layer].read(rows, self.get_seq_length(layer)))

    def get_max_cache_shape(self) -> int | None:
        return self.max_cache_len

    def reset(self) -> None:
        """Forget everything and keep the memory."""
        for store in self._stores:
            store.buffer.zero_()
        self._ring.trial = None
        self.lengths = []

    def __len__(self) -> int:
        return len(self._stores)


def find_layer_misfit(kinds: tuple[str, ...], window: int | None, shape: Any) -> str | None:
    """Why layers of these kinds are not a model's; None where they may be."""
    wanted = tuple(shape.layer_kinds) or ("full",) * shape.num_layers
    if len(wanted) == len(kinds) and wanted != kinds:
        layer = next(layer for layer, kind in enumerate(wanted) if kind != kinds[layer])
        return f"its layer {layer} is {kinds[layer]} and the model's {wanted[layer]}"
    if "sliding" in kinds and shape.window != window:
        return f"its window is {window} and the model's {shape.window}"
    return None
