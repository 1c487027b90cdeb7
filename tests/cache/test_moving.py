"""Rows whose blocks are lent to others hold the same when they are back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unspool.cache import PagedCache, QuantizedCacheConfig
from unspool.cache.paged.joint import find_counted, let_go
from unspool.cache.paged.moving import MovedRows
from unspool.errors import ResourceError

SIZE, LAYERS, HEADS, WIDTH = 16, 2, 1, 16
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "hybrid": {"kinds": ("sliding", "full"), "window": 20},
    "packed": {"cache_config": QuantizedCacheConfig("unspool", nbits=8, q_group_size=16, residual_length=16)},
}


def write(cache: PagedCache, counts: list[int]) -> None:
    span_width = max(counts)
    cache.begin(len(counts), span_width, counts if min(counts) < span_width else None)
    for layer in range(LAYERS):
        cache.write(layer, torch.randn(len(counts), span_width, 2, HEADS, WIDTH))
    cache.end()


def read(cache: PagedCache) -> list[torch.Tensor]:
    """Every layer's keys of every row that it still holds, in order."""
    found = []
    for layer in range(LAYERS):
        keys, values = cache._read(layer, len(cache.lengths), max(cache.lengths))
        found += [part[row, :, :length].clone() for part in (keys, values) for row, length in enumerate(cache.lengths)]
    return found


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25)
@given(data=st.data())
def test_rows_come_back_as_they_were(kind: str, data: st.DataObject) -> None:
    cache = PagedCache(block_size=SIZE, num_blocks=60, **KINDS[kind])
    pools = {id(table.pool): table.pool for table in cache._store.tables}.values()
    write(cache, data.draw(st.lists(st.integers(1, 60), min_size=1, max_size=3)))
    index = data.draw(st.lists(st.integers(0, len(cache.lengths) - 1), min_size=1, max_size=4))
    cache.select_rows(index)  # rows that share their blocks
    other = cache.new_empty()
    write(other, [data.draw(st.integers(1, 40))])
    held, lengths = read(cache), list(cache.lengths)
    users = sum(len(table.find_held()) for table in cache._store.tables)
    moved = MovedRows(cache)
    assert all(not table.find_held() for table in cache._store.tables)
    assert moved.nbytes > 0 and moved.count_blocks(find_counted(cache)) <= users
    write(other, [data.draw(st.integers(1, 40))])  # others have the blocks meanwhile
    moved.bring_back()
    assert cache.lengths == lengths and sum(len(table.find_held()) for table in cache._store.tables) == users
    for now, before in zip(read(cache), held, strict=True):
        assert torch.equal(now, before)
    write(cache, [1] * len(lengths))
    let_go(cache)
    let_go(other)
    assert all(pool.num_free == pool.num_blocks for pool in pools)


def test_rows_stay_away_while_there_is_no_room() -> None:
    cache = PagedCache(block_size=SIZE, num_blocks=4)
    write(cache, [40])
    held = read(cache)
    moved = MovedRows(cache)
    other = cache.new_empty()
    write(other, [30])
    with pytest.raises(ResourceError, match="1 are missing"):
        moved.bring_back()
    let_go(other)
    moved.bring_back()
    assert all(torch.equal(now, before) for now, before in zip(read(cache), held, strict=True))
