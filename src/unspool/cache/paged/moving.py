"""Rows of a paged cache moved to the host's memory, so that others can have their blocks, and back again."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from unspool.cache.paged.block_table import BlockTable
from unspool.cache.paged.cache import PagedCache
from unspool.cache.paged.pool import NOBODYS, BlockPool


@dataclass(slots=True)
class _MovedTable:
    table: BlockTable
    rows: list[list[int]]  # the blocks of each row: 1 + a place in `held`; `NOBODYS` where a row has none
    held: list[torch.Tensor]  # one per buffer of the pool: (blocks, …)
    num_blocks: int


class MovedRows:
    """What the rows of a cache held. The cache keeps its lengths, and must not be read until they are back.

    Copies run on the current stream and wait for nothing: what takes the blocks next, and what brings them back,
    does so on the same stream.
    """

    def __init__(self, cache: PagedCache) -> None:
        """Copy the blocks of a cache to the host and give them back; blocks that rows share are copied once."""
        self._cache = cache
        tables = cache._store.tables
        with cache.pool.lock:
            self._tables = [_copy_out(table) for table in tables]
            for table in tables:
                table.pool.give_back([block for row in table.rows for block in row if block != NOBODYS])
                for row in table.rows:
                    row.clear()  # in place: views of the cache have the very lists
                table.version += 1

    def count_blocks(self, pool: BlockPool) -> int:
        """Blocks of a pool that the rows need to come back."""
        return sum(moved.num_blocks for moved in self._tables if moved.table.pool is pool)

    @property
    def nbytes(self) -> int:
        """Bytes that they take on the host."""
        return sum(part.nbytes for moved in self._tables for part in moved.held)

    def bring_back(self) -> None:
        """Give the rows blocks again that hold what theirs held. Raises and changes nothing if there are too few."""
        with self._cache.pool.lock:
            for pool in {id(moved.table.pool): moved.table.pool for moved in self._tables}.values():
                pool.ensure(self.count_blocks(pool))
            for moved in self._tables:
                _copy_in(moved)
        self._tables = []


def _copy_out(table: BlockTable) -> _MovedTable:
    blocks = table.find_held()
    place = {block: 1 + number for number, block in enumerate(blocks)} | {NOBODYS: NOBODYS}
    held = []
    for buffer in table.pool.buffers if blocks else []:
        gathered = buffer.index_select(0, torch.tensor(blocks, device=buffer.device))
        if buffer.is_cuda:
            pinned = torch.empty(gathered.shape, dtype=gathered.dtype, pin_memory=True)
            gathered = pinned.copy_(gathered, non_blocking=True)
        held.append(gathered)
    return _MovedTable(table, [[place[block] for block in row] for row in table.rows], held, len(blocks))


def _copy_in(moved: _MovedTable) -> None:
    table = moved.table
    pool = table.pool
    fresh = pool.take(moved.num_blocks, cleaned=())
    for buffer, part in zip(pool.buffers, moved.held, strict=False):
        index = torch.tensor(fresh, device=buffer.device)
        buffer.index_copy_(0, index, part.to(buffer.device, non_blocking=True))
    number = [NOBODYS, *fresh]
    for row, places in zip(table.rows, moved.rows, strict=True):
        row[:] = [number[place] for place in places]
    pool.share([block for row in table.rows for block in row if block != NOBODYS])
    pool.give_back(fresh)  # each was taken once, and is counted for its rows now
    table.version += 1
