"""Rows of several paged caches over one pool, as one cache for as long as a pass lasts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

from unspool.cache.paged.block_table import BlockTable
from unspool.cache.paged.cache import PagedCache
from unspool.cache.paged.pool import BlockPool


def shares_pool(cache: Any, pool: BlockPool) -> TypeGuard[PagedCache]:
    """Whether a cache's rows can be read beside others of a pool."""
    return type(cache) is PagedCache and cache.pool is pool


class JointRows:
    """A cache whose rows are those of others: what a pass takes, copies and writes for them is theirs.

    It is kept from pass to pass, so that a device is told what has changed and nothing else.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.cache = PagedCache(pool)
        self.cache._table = BlockTable(pool, owns=False)
        self._caches: list[PagedCache] = []

    def begin(self, caches: Sequence[PagedCache], counts: Sequence[int]) -> PagedCache:
        """The rows of all caches, one cache's after the other's; a cache that is empty gets its count of rows."""
        rows: list[list[int]] = []
        lengths: list[int] = []
        for cache, count in zip(caches, counts, strict=True):
            open_rows(cache, count)
            rows += cache._table.rows  # the very lists
            lengths += cache.lengths
        self._caches = list(caches)
        self.cache._table.rows = rows
        self.cache._table.version += 1
        self.cache.lengths = lengths
        return self.cache

    def end(self) -> None:
        """Let every cache know what its rows hold now."""
        first = 0
        for cache in self._caches:
            stop = first + len(cache.lengths)
            cache.lengths = self.cache.lengths[first:stop]
            cache._table.version += 1
            first = stop
        self.forget()

    def forget(self) -> None:
        """Leave the caches as they are: the pass has failed, or is over."""
        for cache in self._caches:
            cache._table.version += 1  # it may have taken blocks for their rows
        self._caches = []
        self.cache._table.rows, self.cache.lengths, self.cache._span = [], [], None


def open_rows(cache: PagedCache, count: int) -> None:
    """Give an empty cache so many rows that hold nothing."""
    if not cache.lengths:
        cache._table.open(count)
        cache.lengths = [0] * count


def adopt_rows(cache: PagedCache, rows: Sequence[Sequence[int]]) -> None:
    """Let an empty cache begin with rows of full blocks that others hold too."""
    cache.pool.share([block for row in rows for block in row])
    cache._table.open(0)
    cache._table.rows = [list(row) for row in rows]
    cache.lengths = [len(row) * cache.pool.block_size for row in rows]


def list_blocks(cache: PagedCache, row: int) -> list[int]:
    """The blocks of a row."""
    return cache._table.rows[row]


def count_held(cache: PagedCache) -> int:
    """Blocks that a cache's rows hold, each once."""
    return len({block for row in cache._table.rows for block in row})


def let_go(cache: PagedCache) -> None:
    """Give all blocks of a cache back; it is empty then."""
    cache.select_rows([])
    cache._table.cut([0] * len(cache._table.rows))
    cache._table.open(0)
