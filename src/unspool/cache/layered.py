"""A cache of layers that need not hold their keys alike: a store each, full ones beside rings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch

from unspool.cache.base import FIXED_SHAPE, RAGGED, SELECT_ROWS, TRIAL, Cache, Mask, Span
from unspool.cache.places import Places
from unspool.cache.ring import Ring, Trial
from unspool.cache.stores import Allocate, PlainStore, RingStore, Store, join, take_memory
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

    can = frozenset({TRIAL, SELECT_ROWS, RAGGED, FIXED_SHAPE})
    is_compileable = True

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
        self._filled = [0] * len(self._stores)
        self._known_places: Places | None = None

    @property
    def room(self) -> int | None:
        """The most positions that a row can get; None where it can go on for ever."""
        return self.max_cache_len if self._is_bounded else None

    def holds_buffers(self, num_layers: int) -> bool:
        return len(self._stores) == num_layers

    # --- a forward pass ------------------------------------------------------------------------------
    def begin(
        self,
        rows: int,
        num_new: int,
        counts: Sequence[int] | None = None,
        device: torch.device | str = "cpu",
    ) -> Span:
        self._check_rows(rows)
        span = super().begin(rows, num_new, counts, device)
        self._ring.begin(span)
        return span

    def write(self, layer: int, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._stores[layer].write(self._require_span(), kv)

    def end(self) -> None:
        super().end()
        self._note_filled()

    def _reserve(self, stop: int) -> None:
        if self._is_bounded and stop > self.max_cache_len:
            raise SettingError(
                f"position {stop} does not fit a {type(self).__name__} of {self.max_cache_len} positions; "
                "make it larger (max_cache_len) or use cache_implementation='dynamic'"
            )

    def _check_rows(self, rows: int) -> None:
        self._check_batch(rows, self.max_batch_size, "dynamic")

    # --- a captured step -----------------------------------------------------------------------------
    def places(self) -> Places | None:
        """None during a trial, which keeps what its passes write over."""
        if self._ring.trial is not None:
            return None
        buffers, known = [store.buffer for store in self._stores], self._known_places
        if known is None or not all(map(is_, known.buffers, buffers)):
            self._known_places = known = Places(buffers, rooms=[buffer.shape[1] for buffer in buffers])
        return known

    def advance(self, rows: int) -> None:
        self._check_rows(rows)
        starts = self._find_starts(rows)
        self._reserve(max(starts) + 1)
        self.lengths = [start + 1 for start in starts]
        self._note_filled()

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
        self._note_filled()

    def _note_filled(self) -> None:
        self._filled = [max(self.lengths, default=0)] * len(self._stores)

    def _ring_stores(self) -> Iterator[RingStore]:
        return (store for store in self._stores if isinstance(store, RingStore))

    def _select(self, index: torch.Tensor) -> None:
        self._check_rows(len(index))
        held = max(self.lengths, default=0)
        for store in self._stores:
            store.select(index, held)
        self._ring.select(index)

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
        room = Room(rows, positions, heads, width, like.dtype, (like.device,) * len(kinds))
        cache = cls.__new__(cls)
        LayeredCache.__init__(cache, kinds, window, room)
        for layer, store in enumerate(cache._stores):
            held = tensors[f"layer.{layer}"]
            store.buffer[: len(lengths), : held.shape[1]] = held
        cache.lengths = lengths
        cache._note_filled()
        return cache

    # --- the reference's surface ---------------------------------------------------------------------
    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        cache_kwargs: dict[str, Any] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append to one layer; return its buffers, oldest position first: a prompt longer than a window whole."""
        rows, _, num_new, _ = key_states.shape
        self._check_rows(rows)
        self._check_update(rows)
        positions = (cache_kwargs or {}).get("cache_position")
        held = self._filled[layer_idx] if positions is None else int(positions[0])
        self._reserve(held + num_new)
        span = Span(
            [held] * rows,
            num_new,
            [num_new] * rows,
            held + num_new,
            True,
            torch.arange(held, held + num_new, device=key_states.device).expand(rows, num_new),
        )
        store = self._stores[layer_idx]
        if isinstance(store, RingStore):
            self._ring.begin(span)
        kv = join(key_states, value_states)
        store.write(span, kv.to(store.buffer.dtype))
        self._filled[layer_idx] = held + num_new
        self.lengths = [self._filled[0]] * rows
        if isinstance(store, RingStore) and num_new > self._ring.size:
            return key_states, value_states
        keys, values = store.read(rows, self._filled[layer_idx]).unbind(2)
        return keys.transpose(1, 2), values.transpose(1, 2)

    def get_seq_length(self, layer_idx: int | None = 0) -> int:
        return self._filled[layer_idx or 0]

    def get_max_cache_shape(self) -> int | None:
        return self.max_cache_len

    def reset(self) -> None:
        """Forget everything and keep the memory."""
        for store in self._stores:
            store.buffer.zero_()
        self._ring.trial = None
        self._filled = [0] * len(self._stores)
        self.lengths = []

    @property
    def key_cache(self) -> list[torch.Tensor]:
        """Every layer's keys as they are kept, oldest first: (rows, heads, places, width)."""
        return [self._show(layer, 0) for layer in range(len(self._stores))]

    @property
    def value_cache(self) -> list[torch.Tensor]:
        """Every layer's values as they are kept, oldest first: (rows, heads, places, width)."""
        return [self._show(layer, 1) for layer in range(len(self._stores))]

    def _show(self, layer: int, which: int) -> torch.Tensor:
        rows = len(self.lengths) or self.max_batch_size
        return self._stores[layer].read(rows, self._filled[layer]).unbind(2)[which].transpose(1, 2)

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
