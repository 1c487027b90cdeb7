"""A cache in few bits whose memory is taken once, so that a step over it can be captured."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Final, Self

import torch

from unspool.cache.base import FIXED_SHAPE, JOIN, RAGGED, ROLL_BACK, SELECT_ROWS, TRIAL
from unspool.cache.quantized import STEP_ROOM, QuantizedCache
from unspool.cache.span import Span
from unspool.cache.stores.quantized_config import QuantizedCacheConfig
from unspool.errors import SettingError
from unspool.kernels.packed import PackedView

TRIAL_ROOM: Final = 64  # new positions that a step may bring: buffers can't grow


class QuantizedStaticCache(QuantizedCache):
    """A quantised cache whose memory is taken once: its buffers never move, so a step over them can be captured."""

    can = frozenset({ROLL_BACK, TRIAL, SELECT_ROWS, RAGGED, FIXED_SHAPE, JOIN})
    is_compileable = True

    def __init__(
        self,
        cache_config: QuantizedCacheConfig,
        config: Any,
        max_batch_size: int,
        max_cache_len: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        if max_batch_size < 1 or max_cache_len < 1:
            raise SettingError(
                "a quantised static cache needs at least one row and one position, not "
                f"max_batch_size={max_batch_size} and max_cache_len={max_cache_len}"
            )
        super().__init__(cache_config, capacity=max_cache_len)
        self._fit = self.cache_config.find_backend().find_fit()
        self.max_batch_size, self.max_cache_len = max_batch_size, max_cache_len
        self._slots += TRIAL_ROOM - STEP_ROOM
        heads = int(config.num_attention_heads)
        kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
        width = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
        where = torch.device(device if device is not None else "cpu")
        shape = (max_batch_size, 1, 2, kv_heads, width)
        for layer in range(int(config.num_hidden_layers)):
            self._add_store(layer, torch.zeros(1, dtype=dtype, device=where).expand(shape))
        self._counts = torch.zeros(max_batch_size, dtype=torch.int32, device=where)
        self._copied: list[int] = []  # what is in _counts
        self._columns: torch.Tensor | None = None

    def _open(self, rows: int) -> None:
        for store in self._stores:
            store.restart(rows)

    def _look(self, span: Span) -> None:
        """Steps always read packed and recent buffers whole; a prompt that is longer than those takes the detour."""
        self._columns = None
        packed, rows = self._first_recent(), len(span.starts)
        if self._count_slots(span.stop) > self._slots:
            super()._look(span)
            return
        if packed != self._copied:
            self._counts[:rows] = torch.tensor(packed, dtype=torch.int32)
            self._copied = list(packed)
        counts = self._counts[:rows]
        self._columns = span.positions - counts[:, None]
        self._view = PackedView(list(packed), counts, span.positions, self._places)

    def write(self, layer: int, kv: torch.Tensor) -> tuple[Any, Any]:
        if self._columns is None:
            return super().write(layer, kv)
        store, view = self._stores[layer], self._view_of(layer)
        assert view is not None
        return store.show(store.write(self._require_span(), kv, self._columns), view)

    def _reserve(self, stop: int) -> None:
        if stop > self.max_cache_len:
            raise SettingError(
                f"position {stop} does not fit a static cache of {self.max_cache_len} positions; "
                "make it larger (max_cache_len) or use cache_implementation='quantized'"
            )
        self._check_trial(stop)

    def _check_trial(self, stop: int) -> None:
        if self._is_trial and self._count_slots(stop) > self._slots:
            raise SettingError(
                f"a trial up to position {stop} does not fit the {self._slots} positions that a quantised static "
                "cache keeps unpacked; draft fewer tokens, or use cache_implementation='quantized'"
            )

    def _select(self, index: torch.Tensor) -> None:
        self._check_rows(len(index))
        super()._select(index)

    def _join(self, other: QuantizedCache) -> None:
        if other.cache_config != self.cache_config:
            raise SettingError("rows that are packed in another way can't join; make both caches with one cache_config")
        self._reserve(max(other.lengths))
        self._settle_steps()
        other._settle_steps()
        for mine, theirs in zip(self._stores, other._stores, strict=True):
            mine.join(theirs, len(self.lengths), len(other.lengths))

    def _check_rows(self, rows: int) -> None:
        self._check_batch(rows, self.max_batch_size, "quantized")

    def get_max_cache_shape(self) -> int:
        return self.max_cache_len

    def reset(self) -> None:
        """Forget everything and keep the memory."""
        for store in self._stores:
            for tensor in store.tensors():
                tensor.zero_()
            store.restart(0)
        self._is_trial = False
        self.lengths = []

    def _pack(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        facts, tensors = super()._pack()
        return {**facts, "max_cache_len": self.max_cache_len}, tensors

    @classmethod
    def _make_like(
        cls,
        config: QuantizedCacheConfig,
        facts: dict[str, Any],
        recent: list[torch.Tensor],
        tensors: dict[str, torch.Tensor],
    ) -> Self:
        rows, _, _, heads, width = recent[0].shape
        sizes = SimpleNamespace(num_hidden_layers=len(recent), num_attention_heads=heads, head_dim=width)
        room, places = int(facts["max_cache_len"]), tensors["0.0"].shape[2]
        if room > places + config.residual_length:
            raise ValueError(f"max_cache_len={room} is more than the buffers hold")
        return cls(config, sizes, rows, room, recent[0].device, recent[0].dtype)

    def batch_split(self, full_batch_size: int, split_size: int) -> list[Self]:  # noqa: ARG002 - refused
        raise SettingError("the rows of a static cache stay together; use a quantised cache that grows")
