"""The cache that holds its keys in stores: every kind but states, pairs and views."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from unspool.cache.base import Cache
from unspool.cache.places import Places
from unspool.cache.span import Mask, Span
from unspool.cache.stores.layout import split
from unspool.cache.stores.store import Store
from unspool.kernels.ragged import Ragged


class StoredCache(Cache):
    """Keys and values in one store (`stores/`, `paged/`)."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store

    # --- a forward pass ------------------------------------------------------------------------------
    def begin(
        self,
        rows: int,
        num_new: int,
        counts: Sequence[int] | None = None,
        device: torch.device | str = "cpu",
    ) -> Span:
        span = super().begin(rows, num_new, counts, device)
        self._store.begin(span)
        return span

    def _open(self, rows: int) -> None:
        self._store.open(rows)

    def _reserve_rows(self, starts: Sequence[int], stops: Sequence[int], stop: int) -> None:
        self._check_room(max(stops, default=0))
        self._store.reserve(starts, stops, stop)

    def _reserve(self, stop: int) -> None:
        self._reserve_rows(self.lengths, [stop] * len(self.lengths), stop)

    def _check_room(self, stop: int) -> None:
        """Raise if a row would get more positions than it may."""

    def write(self, layer: int, kv: torch.Tensor) -> tuple[Any, Any]:
        return self._store.write(layer, self._require_span(), kv)

    def write_flat(self, layer: int, kv: torch.Tensor, ragged: Ragged) -> tuple[torch.Tensor, torch.Tensor]:
        self.require("take_flat_tokens")
        return self._store.write_flat(layer, self._require_span(), kv, ragged)

    def end(self) -> None:
        super().end()
        self._store.end(self.lengths)

    @property
    def sees_by_position(self) -> bool:  # type: ignore[override]  # it depends on the pass
        return self._store.sees_by_position

    def mask(self, span: Span, window: int | None = None) -> Mask:
        return self._store.mask(span, window)

    def key_positions(self, span: Span, window: int | None = None) -> torch.Tensor:  # noqa: ARG002 - all layers alike
        return self._store.key_positions(span)

    def holds_buffers(self, num_layers: int) -> bool:
        return self._store.num_layers == num_layers

    # --- passes by address ---------------------------------------------------------------------------
    def steady(self) -> AbstractContextManager[Any]:
        return self._store.steady()

    def places(self, *, in_order: bool = False) -> Places | None:  # noqa: ARG002 - they always are
        return self._store.places()

    def open_layers(self, num_layers: int, rows: int, heads: int, width: int, dtype: torch.dtype) -> None:
        for layer in range(self._store.num_layers, num_layers):
            self._store.add_layer(layer, rows, heads, width, dtype, torch.device("cpu"))

    @property
    def longest_stretch(self) -> int | None:
        steps = self._store.count_steps(self.lengths)
        return steps if steps is None else max(1, steps)

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
        self._store.select(index.tolist(), self.lengths)

    def _join(self, other: StoredCache) -> None:
        self._store.join(other._store, self.lengths, other.lengths)

    # --- copies and files ----------------------------------------------------------------------------
    def __deepcopy__(self, memo: dict[int, Any]) -> StoredCache:
        made = copy.copy(self)
        memo[id(self)] = made
        made.lengths, made._store, made._span = list(self.lengths), self._store.clone(), None
        return made

    @property
    def nbytes(self) -> int:
        return self._store.nbytes

    def _held_tensors(self) -> list[torch.Tensor]:
        return self._store.held()

    # --- the reference's surface ---------------------------------------------------------------------
    def _append(self, layer: int, span: Span, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self._store.begin(span)
        self._store.write(layer, span, kv)
        return self._read(layer, len(span.starts), span.stop)

    def _show(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._read(layer, len(self.lengths), self.get_seq_length(layer))

    def _read(self, layer: int, rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        read = self._store.read(layer, rows, length)
        return split(read) if isinstance(read, torch.Tensor) else read

    def __len__(self) -> int:
        return self._store.num_layers
