"""Layers of two kinds: one store for those that see everything, one for those with a window."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any

import torch

from unspool.cache.places import Places
from unspool.cache.span import Mask, Span
from unspool.cache.stores.memory import KeyFormat
from unspool.cache.stores.store import Store


def _forward(name: str) -> Any:
    """The method of that name, called of every store."""

    def call(mixed: MixedStore, *arguments: Any) -> None:
        for store in mixed.stores.values():
            getattr(store, name)(*arguments)

    return call


class MixedStore(Store):
    """A store for "full" layers and one for "sliding" ones, read and written layer by layer."""

    def __init__(self, stores: dict[str, Store], kinds: Sequence[str]) -> None:
        self.stores, self.kinds = stores, tuple(kinds)
        self._homes = [(stores[kind], self.kinds[:layer].count(kind)) for layer, kind in enumerate(self.kinds)]
        self._places: Places | None = None

    def find(self, layer: int) -> tuple[Store, int]:
        """The store of a layer, and the layer's number there."""
        return self._homes[layer]

    def _all(self) -> list[Store]:
        return list(self.stores.values())

    def _find_kind(self, window: int | None) -> Store:
        return self.stores["full" if window is None else "sliding"]

    @property
    def num_layers(self) -> int:
        return sum(store.num_layers for store in self._all())

    @property
    def is_trying(self) -> bool:
        return any(store.is_trying for store in self._all())

    def add_layer(self, layer: int, rows: int, keys: KeyFormat) -> None:
        store, number = self._homes[layer]
        store.add_layer(number, rows, keys)

    open, reserve, begin, end, catch_up = map(_forward, ("open", "reserve", "begin", "end", "catch_up"))
    select, begin_trial, truncate, clear = map(_forward, ("select", "begin_trial", "truncate", "clear"))
    check_truncation = _forward("check_truncation")

    # --- a pass --------------------------------------------------------------------------------------
    def write(self, layer: int, span: Span, kv: torch.Tensor) -> tuple[Any, Any]:
        store, number = self._homes[layer]
        return store.write(number, span, kv)

    def count_steps(self, lengths: Sequence[int]) -> int | None:
        counts = [count for store in self._all() if (count := store.count_steps(lengths)) is not None]
        return min(counts, default=None)

    # --- what is in view -----------------------------------------------------------------------------
    def mask(self, span: Span, window: int | None) -> Mask:
        return self._find_kind(window).mask(span, window)

    def key_positions(self, span: Span, window: int | None = None) -> torch.Tensor:
        return self._find_kind(window).key_positions(span, window)

    def is_in_order(self, window: int | None) -> bool:
        return self._find_kind(window).is_in_order(window)

    # --- rows ----------------------------------------------------------------------------------------
    def join(self, other: MixedStore, mine: Sequence[int], theirs: Sequence[int]) -> None:
        for kind in sorted(self.stores, reverse=True):  # windows first: they may refuse
            self.stores[kind].join(other.stores[kind], mine, theirs)

    def clone(self) -> MixedStore:
        return MixedStore({kind: store.clone() for kind, store in self.stores.items()}, self.kinds)

    # --- memory --------------------------------------------------------------------------------------
    @property
    def nbytes(self) -> int:
        return sum(store.nbytes for store in self._all())

    def held(self) -> list[torch.Tensor]:
        parts = {id(store): store.held() for store in self._all()}
        return [parts[id(store)][number] for store, number in self._homes if number < len(parts[id(store)])]

    def places(self) -> Places | None:
        if any(store.places() is None for store in self._all()):
            return None
        buffers, known = self.held(), self._places
        if known is None or not all(map(is_, known.buffers, buffers)):
            self._places = known = Places(buffers, rooms=[buffer.shape[1] for buffer in buffers])
        return known

    def read(self, layer: int, rows: int, length: int) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        store, number = self._homes[layer]
        return store.read(number, rows, length)
