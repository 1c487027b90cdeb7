"""The cache of fixed size: its buffers never move, so a step over them can be captured."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from unspool.cache.base import DIVIDE, FIXED_SHAPE, FLAT, FORK, RAGGED, ROLL_BACK, SELECT_ROWS, Span
from unspool.cache.buffered import BufferedCache
from unspool.errors import SettingError


class StaticCache(BufferedCache):
    """A cache whose memory is taken once, for `max_batch_size` rows of `max_cache_len` positions."""

    can = frozenset({ROLL_BACK, SELECT_ROWS, RAGGED, FORK, DIVIDE, FLAT, FIXED_SHAPE})
    is_compileable = True

    def __init__(
        self,
        config: Any,
        max_batch_size: int,
        max_cache_len: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
        layer_device_map: dict[int, str | torch.device | int] | None = None,
    ) -> None:
        super().__init__()
        self.max_batch_size = max_batch_size
        self.max_cache_len = max_cache_len or int(config.max_position_embeddings)
        if self.max_batch_size < 1 or self.max_cache_len < 1:
            raise SettingError(
                f"a static cache needs at least one row and one position, "
                f"not max_batch_size={max_batch_size} and max_cache_len={max_cache_len}"
            )
        heads = int(config.num_attention_heads)
        kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
        width = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
        for layer in range(int(config.num_hidden_layers)):
            place = (layer_device_map or {}).get(layer, device)
            where = torch.device(place if place is not None else "cpu")
            self._add_layer(layer, max_batch_size, kv_heads, width, dtype, where)

    def _capacity(self) -> int:
        return self.max_cache_len

    def _reserve(self, stop: int) -> None:
        if stop > self.max_cache_len:
            raise SettingError(
                f"position {stop} does not fit a static cache of {self.max_cache_len} positions; "
                "make it larger (max_cache_len) or use cache_implementation='dynamic'"
            )

    def begin(
        self,
        rows: int,
        num_new: int,
        counts: Sequence[int] | None = None,
        device: torch.device | str = "cpu",
    ) -> Span:
        self._check_rows(rows)
        return super().begin(rows, num_new, counts, device)

    def _select(self, index: torch.Tensor) -> None:
        self._check_rows(len(index))
        for buffer in self._buffers:
            buffer[: len(index)] = buffer[index.to(buffer.device)]

    def _check_rows(self, rows: int) -> None:
        if rows > self.max_batch_size:
            raise SettingError(
                f"{rows} rows do not fit a static cache of max_batch_size={self.max_batch_size}; "
                "make it larger or use cache_implementation='dynamic'"
            )

    def _pack(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        facts, tensors = super()._pack()
        heads, width = self._buffers[0].shape[-2:]
        return {**facts, "rows": self.max_batch_size, "heads": heads, "width": width}, tensors

    @classmethod
    def _unpack(cls, facts: dict[str, Any], tensors: dict[str, torch.Tensor], lengths: list[int]) -> StaticCache:
        rows, room, heads, width = (int(facts[name]) for name in ("rows", "capacity", "heads", "width"))
        if not 0 < rows <= 2**20 or not max(lengths, default=0) <= room <= 2**24 or not tensors:
            raise ValueError(f"{rows} rows of {room} positions can't be for lengths {lengths}")
        sizes = SimpleNamespace(
            num_hidden_layers=len(tensors), num_attention_heads=heads, head_dim=width, hidden_size=heads * width
        )
        like = tensors["layer.0"]
        cache = cls(sizes, rows, room, like.device, like.dtype)
        cache._fill(tensors, lengths)
        return cache

    # --- the reference's surface ---------------------------------------------------------------------
    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        cache_kwargs: dict[str, Any] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write at `cache_kwargs["cache_position"]`, or after what is held; return the whole buffers."""
        self._check_rows(key_states.shape[0])
        self._append(layer_idx, key_states, value_states, (cache_kwargs or {}).get("cache_position"))
        return self._read(layer_idx, self.max_cache_len)

    def get_max_cache_shape(self) -> int:
        return self.max_cache_len

    def reset(self) -> None:
        """Forget everything and keep the memory."""
        for buffer in self._buffers:
            buffer.zero_()
        self._filled = [0] * len(self._buffers)
        self.lengths = []
