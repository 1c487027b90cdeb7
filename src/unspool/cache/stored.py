"""The cache over a store of keys, packed blocks or states: every kind but pairs and views."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from unspool.cache.base import Cache
from unspool.cache.contract.capabilities import FLAT, FORK
from unspool.cache.places import Places
from unspool.cache.sizes import find_layer_misfit
from unspool.cache.span import Mask, Span
from unspool.cache.stores.memory import KeyFormat, split
from unspool.cache.stores.store import Store
from unspool.cache.views.forked import ForkedCache
from unspool.errors import SettingError
from unspool.kernels.ragged import Ragged


class StoredCache(Cache):
    """A cache whose memory is one store (`stores/`, `paged/`)."""

    max_batch_size: int | None = None  # rows that memory was taken for; None: any number
    max_cache_len: int | None = None  # positions that a row can get; None: any number
    kinds: tuple[str, ...] = ()  # "full" or "sliding", one per layer; empty: layers are alike
    window: int | None = None  # positions that a "sliding" layer sees
    _larger_kind = "dynamic"  # the kind to use if those are too few

    _store: Store

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store

    # --- a forward pass ------------------------------------------------------------------------------
    def _begin(self, span: Span) -> None:
        self._store.begin(span)

    def _open(self, rows: int) -> None:
        self._store.open(rows)

    def _check_rows(self, rows: int) -> None:
        if self.max_batch_size is not None and rows > self.max_batch_size:
            raise SettingError(
                f"{rows} rows do not fit a {type(self).__name__} of max_batch_size={self.max_batch_size}; "
                f"make it larger or use cache_implementation={self._larger_kind!r}"
            )

    def _check_room(self, stop: int) -> None:
        """Raise if a row would get more positions than it may."""
        if self.room is not None and stop > self.room:
            raise SettingError(
                f"position {stop} does not fit a {type(self).__name__} of {self.room} positions; make it larger "
                f"(max_cache_len) or use cache_implementation={self._larger_kind!r}"
            )

    def _reserve_rows(self, starts: Sequence[int], stops: Sequence[int], stop: int) -> None:
        self._check_room(stop)
        self._store.reserve(starts, stops, stop)

    def _reserve(self, stop: int) -> None:
        self._reserve_rows(self.lengths, [stop] * len(self.lengths), stop)

    def write(self, layer: int, kv: torch.Tensor) -> tuple[Any, Any]:
        return self._store.write(layer, self._require_span(), kv)

    def write_flat(self, layer: int, kv: torch.Tensor, ragged: Ragged) -> tuple[torch.Tensor, torch.Tensor]:
        self.require(FLAT)
        return self._store.write_flat(layer, self._require_span(), kv, ragged)

    def end(self) -> None:
        super().end()
        self._store.end(self.lengths)

    @property
    def sees_by_position(self) -> bool:
        return self._store.sees_by_position

    def mask(self, span: Span, window: int | None = None) -> Mask:
        return self._store.mask(span, window)

    def key_positions(self, span: Span, window: int | None = None) -> torch.Tensor:
        return self._store.key_positions(span, window)

    def stands_in_order(self, window: int | None) -> bool:
        return self._store.is_in_order(window)

    def holds_buffers(self, num_layers: int) -> bool:
        return self._store.num_layers == num_layers

    # --- passes by address ---------------------------------------------------------------------------
    def steady(self) -> AbstractContextManager[Any]:
        return self._store.steady()

    def places(self, *, in_order: bool = False) -> Places | None:  # they always are
        if type(self).write is not StoredCache.write:
            return None  # a kind that stores in a way of its own
        return self._store.places()

    def last_places(self) -> Places | None:
        is_ours = type(self).places is StoredCache.places and type(self).write is StoredCache.write
        return self._store.last_places() if is_ours else self.places()

    def open_layers(self, num_layers: int, rows: int, keys: KeyFormat) -> None:
        for layer in range(self._store.num_layers, num_layers):
            self._store.add_layer(layer, rows, keys)

    @property
    def longest_stretch(self) -> int | None:
        return self._store.count_steps(self.lengths)

    # --- rows ----------------------------------------------------------------------------------------
    def begin_trial(self) -> None:
        self._store.begin_trial(self.lengths)

    @property
    def is_trying(self) -> bool:
        return self._store.is_trying

    def truncate(self, lengths: Sequence[int]) -> None:
        self._check_lengths(lengths)
        self._store.check_truncation(self.lengths, lengths)
        self.lengths = list(lengths)
        self._store.truncate(self.lengths)

    def _select(self, index: torch.Tensor) -> None:
        self._check_rows(len(index))
        self._store.select(index.tolist(), self.lengths)

    def _join(self, other: StoredCache) -> None:
        self._check_room(max(other.lengths))
        self._store.join(other._store, self.lengths, other.lengths)

    def fork(self, forks: range) -> Cache:
        self.require(FORK)
        return ForkedCache(self, forks, self._store, self._open_forks)

    def _open_forks(self, count: int) -> None:
        """Make sure that `count` candidates can be written past every row's end."""
        stops = [length + count for length in self.lengths]
        self._reserve_rows(self.lengths, stops, max(stops))

    def keep_fork(self, chosen: torch.Tensor) -> None:
        self.require(FORK)
        self._store.keep_forks(chosen, self.lengths)
        self.lengths = [length + 1 for length in self.lengths]

    # --- copies --------------------------------------------------------------------------------------
    def __deepcopy__(self, memo: dict[int, Any]) -> StoredCache:
        made = copy.copy(self)
        memo[id(self)] = made
        made.lengths, made._store, made._span = list(self.lengths), self._store.clone(), None
        return made

    @property
    def nbytes(self) -> int:
        """Bytes that keys and values take."""
        return self._store.nbytes

    def _held_tensors(self) -> list[torch.Tensor]:
        return self._store.held()

    def find_misfit(self, shape: Any) -> str | None:
        misfit = find_layer_misfit(self.kinds, self.window, shape) if self.kinds else None
        return misfit or super().find_misfit(shape)

    # --- the reference's surface ---------------------------------------------------------------------
    def _append(self, layer: int, span: Span, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        held = self._store.held()
        self._store.begin(span)
        self._store.write(layer, span, kv.to(held[layer].device, held[layer].dtype) if layer < len(held) else kv)
        return self._read(layer, len(span.starts), span.stop)

    def _show(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._read(layer, len(self.lengths), self.get_seq_length(layer))

    def _read(self, layer: int, rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        read = self._store.read(layer, rows, length)
        return split(read) if isinstance(read, torch.Tensor) else read

    def get_max_cache_shape(self) -> int | None:
        return self.max_cache_len

    def __len__(self) -> int:
        return self._store.num_layers


class FixedCache(StoredCache):
    """What caches share whose memory is taken once."""

    is_compileable = True
    takes_positions = True

    def reset(self) -> None:
        """Forget everything and keep the memory."""
        self._store.clear()
        self.lengths = []
