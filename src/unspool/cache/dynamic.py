"""The cache that grows with the text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Self

import torch

from unspool.cache.base import BRANCH, DIVIDE, FLAT, FORK, JOIN, LEGACY, RAGGED, ROLL_BACK, SELECT_ROWS, Cache
from unspool.cache.files import saved
from unspool.cache.reference import GrowingSurface, LegacyCache
from unspool.cache.views.branching import BranchingCache, GrowingRows

CHUNK = 64  # positions by which the buffers grow, at least


@saved
class DynamicCache(GrowingRows, GrowingSurface):
    """A cache that grows as tokens arrive, in chunks: no concatenation per token."""

    can = frozenset({ROLL_BACK, SELECT_ROWS, RAGGED, FORK, DIVIDE, FLAT, BRANCH, JOIN, LEGACY})

    def __init__(
        self,
        _distributed_cache_data: Iterable[tuple[torch.Tensor, torch.Tensor]] | None = None,
        *,
        capacity: int | None = None,
    ) -> None:
        super().__init__()
        self._room = _round_up(capacity or 1)
        self._take_legacy(_distributed_cache_data)

    def _capacity(self) -> int:
        return self._room

    def _reserve(self, stop: int) -> None:
        if stop > self._room:
            self._make_room(stop)

    def _make_room(self, stop: int) -> None:
        # A part more than is needed: a text that grows for long is copied seldom, and little is left empty.
        room = _round_up(stop) + stop // 32 // CHUNK * CHUNK
        self._places = None  # or it would keep the old ones
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
    @classmethod
    def from_legacy_cache(cls, past_key_values: LegacyCache | None = None) -> DynamicCache:
        """A cache holding a tuple of (keys, values) pairs."""
        return cls(past_key_values)

    # --- rows and files ------------------------------------------------------------------------------
    def branch(self, num_branches: int) -> Cache:
        self.require(BRANCH)
        return BranchingCache(self, num_branches)

    @classmethod
    def _unpack(cls, facts: dict[str, Any], tensors: dict[str, torch.Tensor], lengths: list[int]) -> DynamicCache:  # noqa: ARG003 - it needs none
        cache = cls()
        cache._room = _round_up(max(lengths, default=1))
        cache._fill(tensors, lengths)
        return cache

    def new_like(self, room: int) -> Self:
        """An empty cache of the same kind."""
        return type(self)(capacity=room)

    def take_rows(self, index: Sequence[int]) -> Self:
        self.require(JOIN)
        part, rows = self.new_like(self._room), list(index)
        for buffer in self._buffers:
            chosen = part._take((len(rows), *buffer.shape[1:]), buffer.dtype, buffer.device)
            part._buffers.append(chosen.copy_(buffer[rows]))
        part.lengths = [self.lengths[row] for row in rows]
        return part


def _round_up(positions: int) -> int:
    return -(-positions // CHUNK) * CHUNK
