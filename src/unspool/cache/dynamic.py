"""The cache that grows with the text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from unspool.cache.base import BRANCH, DIVIDE, FLAT, FORK, LEGACY, RAGGED, ROLL_BACK, SELECT_ROWS
from unspool.cache.buffered import BufferedCache
from unspool.errors import SettingError

CHUNK = 64  # positions by which the buffers grow, at least

LegacyCache = tuple[tuple[torch.Tensor, torch.Tensor], ...]


class DynamicCache(BufferedCache):
    """A cache that grows as tokens arrive, in chunks: no concatenation per token."""

    can = frozenset({ROLL_BACK, SELECT_ROWS, RAGGED, FORK, DIVIDE, FLAT, BRANCH, LEGACY})

    def __init__(
        self,
        _distributed_cache_data: Iterable[tuple[torch.Tensor, torch.Tensor]] | None = None,
        *,
        capacity: int | None = None,
    ) -> None:
        super().__init__()
        self._room = _round_up(capacity or 1)
        for layer, (keys, values) in enumerate(_distributed_cache_data or ()):
            self.update(keys, values, layer)

    def _capacity(self) -> int:
        return self._room

    def _reserve(self, stop: int) -> None:
        if stop > self._room:
            self._make_room(stop)

    def _make_room(self, stop: int) -> None:
        # A part more than is needed: a text that grows for long is copied seldom, and little is left empty.
        room = _round_up(stop) + stop // 32 // CHUNK * CHUNK
        self._told = None  # or it would keep the old ones
        try:
            for layer, buffer in enumerate(self._buffers):  # one layer at a time, so that only one is there twice
                grown = self._take((buffer.shape[0], room, *buffer.shape[2:]), buffer.dtype, buffer.device)
                grown.narrow(1, 0, self._room).copy_(buffer)
                self._buffers[layer] = grown
        except BaseException:  # memory ran out: all layers have the room that they had
            self._buffers[:] = [buffer.narrow(1, 0, self._room) for buffer in self._buffers]
            raise
        self._room = room

    # --- the reference's surface ---------------------------------------------------------------------
    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        cache_kwargs: dict[str, Any] | None = None,  # noqa: ARG002 - the reference's argument; positions follow
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._append(layer_idx, key_states, value_states, None)
        return self._read(layer_idx, self._filled[layer_idx])

    def crop(self, max_length: int) -> None:
        """Keep the first `max_length` positions; a negative number removes as many from the end."""
        held = self.get_seq_length()
        keep = max_length if max_length >= 0 else held + max_length
        if keep < 0:
            raise SettingError(f"crop({max_length}) asks for more than the {held} positions held")
        self.truncate([min(keep, length) for length in self.lengths])

    def to_legacy_cache(self) -> LegacyCache:
        """Keys and values as a tuple of pairs, a layer each."""
        self.require_one_length()
        return tuple(self)

    def require_one_length(self) -> None:
        """Raise the error that says what tuples can't: that rows hold different numbers of positions."""
        if len(set(self.lengths)) > 1:
            raise SettingError(
                f"the rows hold {self.lengths} positions, and tuples of tensors can't say so; "
                "keep the cache itself, or read its tensors layer by layer (cache[layer])"
            )

    @classmethod
    def from_legacy_cache(cls, past_key_values: LegacyCache | None = None) -> DynamicCache:
        """A cache holding a tuple of (keys, values) pairs."""
        return cls(past_key_values)

    def batch_split(self, full_batch_size: int, split_size: int) -> list[DynamicCache]:
        """One cache for every `split_size` rows."""
        parts = []
        for first in range(0, full_batch_size, split_size):
            rows = range(first, min(first + split_size, full_batch_size))
            parts.append(self._copy_of(list(rows)))
        return parts

    @classmethod
    def from_batch_splits(cls, splits: Sequence[DynamicCache]) -> DynamicCache:
        """One cache with the rows of all the given ones."""
        whole = splits[0]._new_like(max(part._room for part in splits))
        for buffers in zip(*(part._buffers for part in splits), strict=True):
            rows, like = sum(len(buffer) for buffer in buffers), buffers[0]
            joined = whole._take((rows, whole._room, *like.shape[2:]), like.dtype, like.device)
            first = 0
            for buffer in buffers:
                joined[first : first + len(buffer), : buffer.shape[1]] = buffer
                first += len(buffer)
            whole._buffers.append(joined)
        whole.lengths = [length for part in splits for length in part.lengths]
        whole._note_filled()
        return whole

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        self.select_rows([row for row in range(len(self.lengths)) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only the given rows."""
        self.select_rows([int(i) for i in indices])

    @classmethod
    def _unpack(cls, facts: dict[str, Any], tensors: dict[str, torch.Tensor], lengths: list[int]) -> DynamicCache:  # noqa: ARG003 - it needs none
        cache = cls()
        cache._room = _round_up(max(lengths, default=1))
        cache._fill(tensors, lengths)
        return cache

    def _new_like(self, room: int) -> DynamicCache:
        """An empty cache of the same kind."""
        return DynamicCache(capacity=room)

    def _copy_of(self, rows: list[int]) -> DynamicCache:
        part = self._new_like(self._room)
        for buffer in self._buffers:
            chosen = part._take((len(rows), *buffer.shape[1:]), buffer.dtype, buffer.device)
            part._buffers.append(chosen.copy_(buffer[rows]))
        part.lengths = [self.lengths[row] for row in rows]
        part._note_filled()
        return part


def _round_up(positions: int) -> int:
    return -(-positions // CHUNK) * CHUNK
