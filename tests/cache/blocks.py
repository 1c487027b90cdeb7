"""Rows in the blocks of a pool, and who holds them."""

from __future__ import annotations

from tests.cache.plain_cache import Plain

from unspool.cache import BlockPool, PagedCache
from unspool.cache.paged.pool import NOBODYS


def count_holders(pool: BlockPool, *caches: PagedCache) -> None:
    """A block has as many users as rows hold it, and one that none holds is free."""
    holders = [0] * (pool.num_blocks + 1)
    for cache in caches:
        for row in cache._store.tables[0].rows:
            assert len(set(row)) == len(row)
            for block in row:
                holders[block] += 1
    assert holders[NOBODYS] == 0
    assert holders[1:] == [pool.count_users(block) for block in range(1, pool.num_blocks + 1)]
    assert pool.num_free == holders[1:].count(0)
    assert all(not buffer[NOBODYS].any() for buffer in pool.buffers)  # nobody's stays zero


def start(pool: BlockPool, lengths: list[int]) -> Plain:
    """Rows of these lengths in a cache over a pool."""
    plain = Plain(PagedCache(pool), [[] for _ in lengths])
    plain.read(max(lengths), lengths)
    return plain
