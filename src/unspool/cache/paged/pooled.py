"""What stores share whose rows hold blocks of a pool."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from unspool.cache.paged.block_table import BlockTable
from unspool.cache.paged.pool import BlockPool
from unspool.cache.places import Places
from unspool.cache.stores.store import Store


class PooledStore(Store):
    """A store whose rows hold blocks of a pool: what they hold, and rows that are lent."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool  # of plain keys
        self._places: Places | None = None

    @property
    @abstractmethod
    def tables(self) -> list[BlockTable]:
        """The tables of blocks that rows hold."""

    def steady(self) -> AbstractContextManager[Any]:
        return self.pool.lock

    def borrow(self, stores: Sequence[Any]) -> None:
        """Let the rows be those of other stores of the same layers."""
        for number, table in enumerate(self.tables):
            table.borrow([store.tables[number] for store in stores])

    def hand_back(self, stores: Sequence[Any]) -> None:
        """Let go of rows that were borrowed."""
        self.borrow(())
        for store in stores:
            for table in store.tables:
                table.version += 1  # blocks may have been taken for its rows

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks that the rows hold, each once; `pool.nbytes` is what a pool has taken."""
        return sum(len(table.find_held()) * table.pool.block_nbytes for table in self.tables)


def read_rows(rows: Any, counts: Sequence[int], users: list[int], may_lack: bool = False) -> None:
    """Count the users of blocks that a file gives to rows; a ValueError says what can't be."""
    if [len(row) for row in rows] != list(counts):
        raise ValueError(f"blocks {rows} do not fit rows of {list(counts)}")
    for block in (block for row in rows for block in row):
        if may_lack and block == -1 and isinstance(block, int):
            continue
        if not isinstance(block, int) or not 0 <= block < len(users):
            raise ValueError(f"block {block!r} is none of its {len(users)}")
        users[block] += 1
