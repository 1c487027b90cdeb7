"""Layers that share a table of blocks: where a pass writes in their blocks, and how it reads them in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from unspool.cache.paged.block_table import BlockTable
from unspool.cache.paged.pool import BlockPool
from unspool.cache.span import Span
from unspool.kernels.ragged import Ragged


@dataclass(slots=True)
class _Move:
    """What one pass writes where and reads where, worked out once for all layers of a group."""

    slots: torch.Tensor  # (positions written,): places in all blocks, one block after the other
    real: torch.Tensor | None  # which of (rows * new) are written; None: all
    first: int | None  # the first block of a lone row whose blocks lie one after the other
    blocks: torch.Tensor | None  # (rows * blocks in view,); None: the new keys are all there are, or `first` says it


class BlockGroup:
    """Layers that share a table of blocks."""

    def __init__(self, pool: BlockPool, window: int | None, table: BlockTable | None = None) -> None:
        self.pool, self.window = pool, window
        self.table = table if table is not None else BlockTable(pool)
        self._move: _Move | None = None

    def forget_pass(self) -> None:
        """Drop what was worked out for a pass."""
        self._move = None

    def plan(self, span: Span, device: torch.device) -> _Move:
        """Where a pass writes and reads."""
        if self._move is None:
            index = self.table.put_on(device, self.pool.count_blocks(span.stop))
            slots, real = index.find_slots(span.positions, self.pool.block_size).flatten(), None
            if min(span.counts) < span.num_new:
                is_real = torch.arange(span.num_new) < torch.tensor(span.counts)[:, None]  # (rows, new)
                real = is_real.flatten().nonzero()[:, 0].to(device)
                slots = slots[real]
            if max(span.starts) == 0:
                self._move = _Move(slots, real, None, None)
            else:
                self._move = self.plan_view(slots, real, span.stop, device)
        return self._move

    def plan_flat(self, span: Span, ragged: Ragged, device: torch.device) -> _Move:
        """The same for real tokens only."""
        if self._move is None:
            index = self.table.put_on(device, self.pool.count_blocks(span.stop))
            slots = index.find_flat_slots(ragged.rows, ragged.positions, self.pool.block_size)
            self._move = self.plan_view(slots, None, span.stop, device)
        return self._move

    def plan_forks(self, find_slots: Callable[[], torch.Tensor], stop: int, device: torch.device) -> _Move:
        """The same for candidates at positions (rows, forks)."""
        if self._move is None:
            slots = self.table.put_on(device).find_slots(find_slots(), self.pool.block_size).flatten()
            self._move = self.plan_view(slots, None, stop, device)
        return self._move

    def plan_view(self, slots: torch.Tensor, real: torch.Tensor | None, stop: int, device: torch.device) -> _Move:
        """How the first `stop` positions of every row are read: in one piece if a lone row's blocks allow it."""
        rows, num_blocks = self.table.rows, self.pool.count_blocks(stop)
        if len(rows) == 1 and len(rows[0]) >= num_blocks:
            first = rows[0][0]
            if rows[0][:num_blocks] == list(range(first, first + num_blocks)):
                return _Move(slots, real, first, None)
        return _Move(slots, real, None, self.table.put_on(device, num_blocks).find_blocks(len(rows), num_blocks))

    def view(self, buffer: torch.Tensor, move: _Move, rows: int, stop: int) -> torch.Tensor:
        """Keys and values in order: (rows, stop, 2, heads, width); zeros where a row holds nothing."""
        if move.first is not None:
            return buffer[move.first : move.first + self.pool.count_blocks(stop)].flatten(0, 1)[None, :stop]
        assert move.blocks is not None
        return buffer.index_select(0, move.blocks).view(rows, -1, *buffer.shape[2:])[:, :stop]

    def write(self, buffer: torch.Tensor, span: Span, kv: torch.Tensor) -> torch.Tensor:
        """Store a pass in a layer's blocks; return keys and values in order: (rows, stop, 2, heads, width)."""
        move, new = self.plan(span, kv.device), kv.reshape(-1, *kv.shape[2:])
        if move.real is not None:
            new = new.index_select(0, move.real)
        buffer.flatten(0, 1).index_copy_(0, move.slots, new)
        if move.first is None and move.blocks is None:  # nothing was held before: what is new is all there is
            return kv
        return self.view(buffer, move, len(span.starts), span.stop)

    def read(self, buffer: torch.Tensor, rows: int, stop: int) -> torch.Tensor:
        """The first `stop` keys and values in order: (rows, stop, 2, heads, width)."""
        none = torch.empty(0, dtype=torch.int64, device=buffer.device)
        return self.view(buffer, self.plan_view(none, None, stop, buffer.device), rows, stop)

    def let_go(self, lengths: Sequence[int]) -> None:
        """Give back what no query sees again, even after one position is taken back."""
        if self.window is not None:
            self.table.let_go([length - self.window for length in lengths])

    def clone(self) -> BlockGroup:
        """A group whose rows have the same blocks."""
        return BlockGroup(self.pool, self.window, self.table.clone())
