"""Rows that join a batch and leave it hold what they held alone."""

from __future__ import annotations

import pytest
from tests.cache.plain_cache import (
    KINDS,
    MOST_ROWS,
    Plain,
    join,
    take,
)

from unspool.cache import (
    BlockPool,
    PagedCache,
)
from unspool.errors import ResourceError, SettingError


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_joined_midway_hold_what_they_held_alone(kind: str) -> None:
    plain = Plain(KINDS[kind](), [[], []])
    plain.read(11, [11, 4])
    newcomer = Plain(KINDS[kind](), [[], []], written=3000)
    newcomer.read(9, [3, 9])
    newcomer.read(1)
    plain.read(1)
    join(plain, newcomer)
    plain.read(1)
    newcomer.read(2)  # it goes its own way
    plain.read(3, [3, 1, 2, 0])
    left = take(plain, [3, 0])
    plain.select([1, 2])
    left.read(8, [8, 2])
    plain.read(1)
    join(left, plain)
    left.read(1)
    left.select([2, 1])
    left.read(20, [20, 7])


@pytest.mark.parametrize("kind", KINDS)
def test_rows_join_a_batch_that_all_have_left(kind: str) -> None:
    plain, newcomer = Plain(KINDS[kind](), []), Plain(KINDS[kind](), [[], []])
    newcomer.read(12, [12, 5])
    join(plain, newcomer)  # nothing was ever written here
    plain.read(1)
    plain.select([])
    assert plain.cache.lengths == []
    join(plain, newcomer)
    join(plain, take(newcomer, [1]))
    plain.read(1)
    plain.read(4, [4, 2, 3])


def test_what_can_not_join() -> None:
    with pytest.raises(SettingError, match="rows of a StaticCache can't join those of a DynamicCache"):
        KINDS["dynamic"]().join(KINDS["static"]())
    full = Plain(KINDS["static"](), [[]] * MOST_ROWS)
    full.read(2)
    with pytest.raises(SettingError, match=f"{MOST_ROWS + 1} rows do not fit"):
        full.cache.join(full.cache.take_rows([0]))
    full.read(1)
    for kind in ("sliding", "quantized", "sink"):
        plain = Plain(KINDS[kind](), [[]])
        plain.read(2)
        plain.cache.begin_trial()
        with pytest.raises(SettingError, match="can't join while tokens are tried"):
            plain.cache.join(plain.cache.clone())
    few = PagedCache(block_size=16, num_blocks=3)
    Plain(few, [[]]).read(20)
    other = PagedCache(block_size=16)
    Plain(other, [[], []]).read(17)
    before = few.pool.num_free
    with pytest.raises(ResourceError, match="3 are missing"):
        few.join(other)
    assert (few.lengths, few.pool.num_free) == ([20], before)


def test_rows_over_one_pool_join_without_a_copy() -> None:
    pool = BlockPool(16)
    plain, other = Plain(PagedCache(pool), [[]]), Plain(PagedCache(pool), [[], []], written=3000)
    plain.read(40)
    other.read(33, [33, 20])
    used = pool.num_blocks - pool.num_free
    join(plain, other)
    assert pool.num_blocks - pool.num_free == used
    del other
    plain.read(1)
    plain.select([1, 2])
    plain.read(3)
    plain.select([])
    assert pool.num_free == pool.num_blocks
