"""Steps that look only at rows whose next block is due leave a paged cache as steps that look at all of them do."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unspool.cache import BlockPool, PagedCache
from unspool.errors import ResourceError

SIZE = 16


def make(lengths: list[int], num_blocks: int) -> PagedCache:
    cache = PagedCache(BlockPool(SIZE, num_blocks))
    cache._store.open(len(lengths))
    cache.lengths = [0] * len(lengths)
    cache._reserve_rows(cache.lengths, lengths, max(lengths))
    cache.lengths = list(lengths)
    return cache


def check(cache: PagedCache) -> None:
    """Every row has blocks for its positions, of which the last is nobody else's, and a device knows all of them."""
    [table] = cache._plain.tables
    told = table.put_on(torch.device("cpu")).table
    for row, (blocks, length) in enumerate(zip(table.rows, cache.lengths, strict=True)):
        assert len(blocks) * SIZE >= length
        assert told[row, : len(blocks)].tolist() == blocks and not told[row, len(blocks) :].any()
        if length:
            assert cache.pool.count_users(blocks[(length - 1) // SIZE]) == 1


@settings(max_examples=30)
@given(st.data())
def test_any_steps_between_any_changes(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=5))
    cache = make(lengths, data.draw(st.sampled_from([40, 400])))
    kept = []
    for _ in range(data.draw(st.integers(1, 6))):
        for _ in range(data.draw(st.integers(1, 40))):
            before = list(cache.lengths)
            try:
                cache.advance(len(before))
            except ResourceError:
                assert cache.lengths == before
                return
            assert cache.lengths == [length + 1 for length in before]
            check(cache)
        change = data.draw(st.sampled_from(["none", "select", "truncate", "clone", "pass"]))
        if change == "select":
            cache.select_rows(data.draw(st.lists(st.integers(0, len(cache.lengths) - 1), min_size=1, max_size=5)))
        elif change == "truncate":
            cache.truncate([data.draw(st.integers(1, length)) for length in cache.lengths])
        elif change == "clone":
            kept.append(cache.clone())
        elif change == "pass":
            stops = [length + 3 for length in cache.lengths]
            try:
                cache._reserve_rows(cache.lengths, stops, max(stops))
            except ResourceError:
                return
            cache.lengths = stops


def test_a_pool_that_is_empty_changes_nothing() -> None:
    cache = make([15, 14], 3)
    for _ in range(2):
        cache.advance(2)
    assert cache.lengths == [17, 16] and cache.pool.num_free == 0
    with pytest.raises(ResourceError):
        cache.advance(2)
    assert cache.lengths == [17, 16]


def test_blocks_are_taken_ahead_only_if_there_are_many() -> None:
    plenty, few = make([10, 4], 400), make([10, 4], 6)
    for cache in (plenty, few):
        for _ in range(7):
            cache.advance(2)
    assert [len(row) for row in plenty._plain.tables[0].rows] == [2, 2]
    assert [len(row) for row in few._plain.tables[0].rows] == [2, 1]
