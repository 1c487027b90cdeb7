"""The cache of fixed size: its buffers never move, so a step over them can be captured."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from unspool.cache.base import DIVIDE, FIXED_SHAPE, FLAT, FORK, JOIN, RAGGED, ROLL_BACK, SELECT_ROWS
from unspool.cache.buffered import BufferedCache
from unspool.cache.files import check_room, saved
from unspool.cache.span import Span
from unspool.cache.stores.layout import split
from unspool.errors import SettingError


@saved
class StaticCache(BufferedCache):
    """A cache whose memory is taken once, for `max_batch_size` rows of `max_cache_len` positions."""

    can = frozenset({ROLL_BACK, SELECT_ROWS, RAGGED, FORK, DIVIDE, FLAT, FIXED_SHAPE, JOIN})
    is_compileable = True
    takes_positions = True

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

    def _select(self, index: torch.Tensor) -> None:
        self._check_rows(len(index))
        for buffer in self._buffers:
            buffer[: len(index)] = buffer[index.to(buffer.device)]

    def _join(self, other: BufferedCache) -> None:
        mine, held = len(self.lengths), max(other.lengths)
        self._reserve(held)
        for buffer, given in zip(self._buffers, other._buffers, strict=True):
            buffer[mine : mine + len(other.lengths), :held] = given[: len(other.lengths), :held]

    def _check_rows(self, rows: int) -> None:
        self._check_batch(rows, self.max_batch_size, "dynamic")

    def _pack(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        facts, tensors = super()._pack()
        heads, width = self._buffers[0].shape[-2:]
        return {**facts, "rows": self.max_batch_size, "heads": heads, "width": width}, tensors

    @classmethod
    def _unpack(cls, facts: dict[str, Any], tensors: dict[str, torch.Tensor], lengths: list[int]) -> StaticCache:
        rows, room, heads, width = (int(facts[name]) for name in ("rows", "capacity", "heads", "width"))
        if not 0 < rows <= 2**20 or not max(lengths, default=0) <= room <= 2**24 or not tensors:
            raise ValueError(f"{rows} rows of {room} positions can't be for lengths {lengths}")
        if heads < 1 or width < 1:
            raise ValueError(f"{heads} heads of width {width} can't be")
        sizes = SimpleNamespace(
            num_hidden_layers=len(tensors), num_attention_heads=heads, head_dim=width, hidden_size=heads * width
        )
        like = tensors["layer.0"]
        check_room(len(tensors) * rows * room * 2 * heads * width * like.element_size(), tensors)
        cache = cls(sizes, rows, room, like.device, like.dtype)
        cache._fill(tensors, lengths)
        return cache

    # --- the reference's surface ---------------------------------------------------------------------
    def _append(self, layer: int, span: Span, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The whole buffers are returned, as the reference's are."""
        super()._append(layer, span, kv)
        return split(self.rows_of(layer))

    def get_max_cache_shape(self) -> int:
        return self.max_cache_len

    def reset(self) -> None:
        """Forget everything and keep the memory."""
        for buffer in self._buffers:
            buffer.zero_()
        self.lengths = []
