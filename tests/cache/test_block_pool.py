"""The pool of blocks: what is taken, given back and cleaned, and how it grows."""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cache.blocks import start
from tests.cache.plain_cache import HEADS, WIDTH

from unspool.cache import BlockPool, PagedCache
from unspool.cache.paged.pool import BLOCK_SIZE, NOBODYS
from unspool.cache.stores.memory import KeyFormat
from unspool.errors import ResourceError, SettingError

SIZE = 16  # positions of a block, here


def test_blocks_are_taken_shared_and_given_back() -> None:
    pool = BlockPool(SIZE, 4)
    first = pool.take(3)
    assert first == [1, 2, 3] and (pool.num_free, pool.num_blocks, pool.is_fixed) == (1, 4, True)
    pool.share([2])
    pool.give_back([2, 3])
    assert [pool.count_users(block) for block in (1, 2, 3, 4)] == [1, 1, 0, 0] and pool.take(1) == [3]
    with pytest.raises(ResourceError, match=r"3 more blocks of 16 .* 1 of the pool's 4 are free: 2 are missing"):
        pool.take(3)
    assert pool.num_free == 1
    for call in (pool.share, pool.give_back):
        for block in (NOBODYS, 4):
            with pytest.raises(SettingError, match=f"block {block} is nobody's"):
                call([block])


def test_a_block_holds_nothing_of_whoever_had_it() -> None:
    pool = BlockPool(SIZE, 2)
    buffer = pool.open_layer(0, KeyFormat(HEADS, WIDTH, torch.float32, torch.device("cpu")))
    [block] = pool.take(1)
    buffer[block] = torch.nan
    [copied] = pool.copy([block])
    assert buffer[copied].isnan().all()
    pool.give_back([block, copied])
    assert all(not buffer[each].any() for each in pool.take(2))


def test_blocks_that_a_pass_fills_are_not_cleaned() -> None:
    pool = BlockPool(SIZE, 8)
    first = start(pool, [SIZE * 4, SIZE * 3, 5])
    for buffer in pool.buffers:
        buffer[1:] = torch.nan
    first.cache.select_rows([])
    first.cache._store.open(0)
    assert pool.num_free == 8
    second = start(pool, [SIZE * 2, SIZE + 2, SIZE - 1])
    rows = second.cache._store.tables[0].rows
    for buffer in pool.buffers:
        assert not buffer[[block for row in rows for block in row]].isnan().any()
    second.cache.make_room(3, SIZE)  # written later, position by position
    rows = second.cache._store.tables[0].rows
    for buffer in pool.buffers:
        assert not buffer[[block for row in rows for block in row]].isnan().any()


def test_a_pool_grows_by_a_part_of_itself() -> None:
    pool = BlockPool(SIZE)
    pool.take(100)
    buffer = pool.open_layer(0, KeyFormat(HEADS, WIDTH, torch.float32, torch.device("cpu")))
    buffer[7] = 3.0
    assert pool.take(1) == [101] and pool.num_blocks == 106
    assert pool.buffers[0].shape[0] == 107 and (pool.buffers[0][7] == 3).all()
    assert pool.nbytes == 107 * SIZE * 2 * HEADS * WIDTH * 4 == 107 * pool.block_nbytes


@pytest.mark.parametrize("size", [0, 8, 17, 2048, True, 16.0])
def test_blocks_are_powers_of_two(size: Any) -> None:
    with pytest.raises(SettingError, match="power of two from 16 to 1024"):
        BlockPool(size)


@pytest.mark.parametrize("count", [0, -1, 2**40, True, 3.0])
def test_a_pool_is_bounded(count: Any) -> None:
    with pytest.raises(SettingError, match="num_blocks"):
        BlockPool(SIZE, count)


def test_a_cache_has_one_pool() -> None:
    with pytest.raises(SettingError, match="a pool has its blocks"):
        PagedCache(BlockPool(SIZE), num_blocks=4)
    with pytest.raises(SettingError, match="max_cache_len"):
        PagedCache(max_cache_len=0)


def test_blocks_are_what_the_docs_say() -> None:
    assert BLOCK_SIZE == 64 == PagedCache().pool.block_size


def test_a_pool_that_grows_keeps_no_old_memory() -> None:
    """What was told of the blocks before must not keep them: the old ones would stay beside the new ones."""
    caches = [PagedCache(pool=(pool := BlockPool(16))), PagedCache(pool=pool)]
    for cache in caches:
        cache.begin(1, 20)
        for layer in range(2):
            cache.write(layer, torch.zeros(1, 20, 2, 1, 8))
        cache.end()
    told = [cache.places() for cache in caches]
    old = [weakref.ref(buffer) for buffer in pool.buffers]
    while pool.num_free:
        caches[0].advance(1)
    assert [cache.places() for cache in caches] == told
    caches[0].advance(1)
    while caches[0].lengths[0] % 16 != 1:
        caches[0].advance(1)
    assert all(each() is None for each in old)
    for cache in caches:
        places = cache.places()
        assert places is not None and len(places.buffers) == 2
        assert all(mine is its for mine, its in zip(places.buffers, pool.buffers, strict=True))


def test_a_large_pool_costs_what_is_used_of_it() -> None:
    """Pages of a large pool on a CPU are the system's, zeroed where they are first written."""

    def count_resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    if not Path("/proc/self/statm").exists():
        pytest.skip("memory is read from Linux' /proc")
    before = count_resident()
    pool = BlockPool(64, 4096)
    buffer = pool.open_layer(0, KeyFormat(4, 64, torch.float32, torch.device("cpu")))
    assert buffer.nbytes > 500 << 20 and buffer.data_ptr() % 64 == 0
    assert count_resident() - before < 64 << 20
    assert not buffer[::512].any()
    buffer[7] = 1.0
    assert buffer[7].sum() == buffer[7].numel()
