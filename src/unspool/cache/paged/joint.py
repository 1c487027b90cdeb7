"""Rows of several paged caches over one pool, as one cache for as long as a pass lasts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

from unspool.cache.paged.cache import PagedCache
from unspool.cache.paged.packed_blocks import PackedBlockStore
from unspool.cache.paged.pool import BlockPool


def shares_pool(cache: Any, pool: BlockPool) -> TypeGuard[PagedCache]:
    """Whether a cache's rows can be read beside others of a pool."""
    return type(cache) is PagedCache and cache.pool is pool


class JointRows:
    """A cache whose rows are those of others: what a pass takes, copies and writes for them is theirs.

    It is kept from pass to pass, so that a device is sent what has changed and nothing else.
    """

    def __init__(self, cache: PagedCache) -> None:
        """`cache` is one of the same kind without rows."""
        self.cache = cache
        self._caches: list[PagedCache] = []

    def begin(self, caches: Sequence[PagedCache], counts: Sequence[int]) -> PagedCache:
        """The rows of all caches, one cache's after the other's; a cache that is empty gets its count of rows."""
        for cache, count in zip(caches, counts, strict=True):
            open_rows(cache, count)
        self._caches = list(caches)
        self.cache._store.borrow([cache._store for cache in caches])
        self.cache.lengths = [length for cache in caches for length in cache.lengths]
        return self.cache

    def end(self) -> None:
        """Let every cache know what its rows hold now."""
        first = 0
        for cache in self._caches:
            stop = first + len(cache.lengths)
            cache.lengths = self.cache.lengths[first:stop]
            first = stop
        self.forget()

    def forget(self) -> None:
        """Leave the caches as they are: the pass has failed, or is over."""
        self.cache._store.hand_back([cache._store for cache in self._caches])
        self._caches, self.cache.lengths, self.cache._span = [], [], None


def open_rows(cache: PagedCache, count: int) -> None:
    """Give an empty cache so many rows that hold nothing."""
    if not cache.lengths:
        cache._store.open(count)
        cache.lengths = [0] * count


def adopt_rows(cache: PagedCache, rows: Sequence[Sequence[int]]) -> None:
    """Let an empty cache begin with rows of full blocks that others hold too; it must keep every key as it is."""
    [table] = cache._plain.tables
    cache.pool.share([block for row in rows for block in row])
    table.open(0)
    table.rows = [list(row) for row in rows]
    cache.lengths = [len(row) * cache.pool.block_size for row in rows]


def list_blocks(cache: PagedCache, row: int) -> list[int]:
    """The blocks of a row; the cache must keep every key as it is."""
    [table] = cache._plain.tables
    return table.rows[row]


def find_counted(cache: PagedCache) -> BlockPool:
    """The pool whose blocks rows take with every `block_size` positions: where keys are packed, that of packed ones."""
    store = cache._store
    return store.packed_pool if isinstance(store, PackedBlockStore) else store.pool


def list_windows(cache: PagedCache) -> list[int | None]:
    """The window of each group of layers that has a table of its own; None: its rows keep every block."""
    return [group.window for group in cache._plain.groups]


def count_held(cache: PagedCache) -> int:
    """Blocks of the counted pool that a cache's rows hold, each once."""
    pool = find_counted(cache)
    return sum(table.count_held() for table in cache._store.tables if table.pool is pool)


def close_pools(cache: PagedCache) -> None:
    """Let the memory go of all pools that a cache has blocks of, whatever else holds them."""
    for table in cache._store.tables:
        table.pool.close()


def let_go(cache: PagedCache) -> None:
    """Give all blocks of a cache back; it is empty then."""
    cache.select_rows([])
    cache._store.open(0)
