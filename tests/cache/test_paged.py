"""The cache in blocks: what rows share, and what they give back."""

from __future__ import annotations

import gc
import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.cache.blocks import count_holders
from tests.cache.plain_cache import HEADS, LAYERS, WIDTH, Plain

from unspool.cache import BlockPool, Cache, PagedCache
from unspool.cache.paged.pool import BLOCK_SIZE, NOBODYS
from unspool.cache.stores.memory import KeyFormat
from unspool.errors import LoadError, ResourceError, SettingError

SIZE = 16  # positions of a block, here
BLOCK_BYTES = LAYERS * SIZE * 2 * HEADS * WIDTH * 4


def start(pool: BlockPool, lengths: list[int]) -> Plain:
    plain = Plain(PagedCache(pool), [[] for _ in lengths])
    plain.read(max(lengths), lengths)
    return plain


# --- the pool -----------------------------------------------------------------------------------------------


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


# --- what rows hold -----------------------------------------------------------------------------------------


def test_a_ragged_batch_takes_what_its_rows_need() -> None:
    pool = BlockPool(SIZE)
    plain = start(pool, [200, 3, 17, 1])
    cache = plain.cache
    assert cache.nbytes == (13 + 1 + 2 + 1) * BLOCK_BYTES and pool.num_blocks == 17
    plain.truncate([33, 3, 16, 0])
    assert cache.nbytes == (3 + 1 + 1) * BLOCK_BYTES and pool.num_free == 12
    plain.read(1)
    plain.select([1])
    assert cache.nbytes == BLOCK_BYTES
    count_holders(pool, cache)


def test_rows_share_blocks_until_they_part() -> None:
    pool = BlockPool(SIZE)
    plain = start(pool, [40])
    cache = plain.cache
    plain.select([0, 0, 0])
    assert cache.nbytes == 3 * BLOCK_BYTES
    plain.read(1)  # each now has a last block of its own; the last of them kept the first one
    assert cache.nbytes == (2 + 3) * BLOCK_BYTES
    plain.select([2, 2, 1])
    assert cache.nbytes == (2 + 2) * BLOCK_BYTES
    plain.read(9, [9, 8, 0])
    plain.read(1)
    count_holders(pool, cache)
    full = start(pool, [32])
    full.select([0, 0])
    full.read(1)  # full blocks are never copied
    assert full.cache.nbytes == (2 + 2) * BLOCK_BYTES


def test_clones_share_and_go_their_own_way() -> None:
    pool = BlockPool(SIZE)
    plain = start(pool, [40, 7])
    others = [Plain(plain.cache.clone(), [list(row) for row in plain.rows], 10_000 * n) for n in (1, 2)]
    assert pool.num_blocks - pool.num_free == 4  # three of the first row, one of the second
    for number, one in enumerate((plain, *others)):
        one.read(3, [3, number])
        one.read(1)
    count_holders(pool, plain.cache, *(other.cache for other in others))
    del others, one
    count_holders(pool, plain.cache)
    plain.read(2)


def test_blocks_come_back_when_a_cache_is_gone() -> None:
    pool = BlockPool(SIZE, 8)
    plain = start(pool, [100])
    with pytest.raises(ResourceError, match=r"2 more blocks of 16 .* 1 of the pool's 8 are free: 1 are missing"):
        start(pool, [20])
    gc.collect()
    assert pool.num_free == 1
    del plain
    gc.collect()
    assert pool.num_free == 8
    start(pool, [128])


def test_a_pass_without_blocks_changes_nothing() -> None:
    pool = BlockPool(SIZE, 5)
    plain = start(pool, [30, 30])
    plain.read(2)
    cache = plain.cache
    rows = [list(row) for row in cache._store.tables[0].rows]
    for call in (lambda: cache.begin(2, 1), lambda: cache.advance(2), lambda: cache.fork(range(2)).begin(4, 1)):
        with pytest.raises(ResourceError, match="1 are missing"):
            call()
        assert cache.lengths == [32, 32] and cache._store.tables[0].rows == rows
    plain.read(1, [1, 0])  # one of them can go on
    plain.truncate([20, 20])
    plain.read(1)
    count_holders(pool, cache)


def test_a_row_has_no_more_than_it_was_told() -> None:
    cache = PagedCache(block_size=SIZE, max_cache_len=20)
    plain = Plain(cache, [[], []])
    plain.read(19)
    with pytest.raises(SettingError, match="position 21 does not fit a paged cache of 20 positions a row"):
        cache.begin(2, 2)
    plain.read(2, [1, 0])
    assert cache.room == 20 and PagedCache(BlockPool(SIZE, 3)).room == 48 and PagedCache().room is None


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[str, Any]]:
    """What happens to several caches of one pool: their number grows by clones."""
    return draw(
        st.lists(
            st.tuples(
                st.sampled_from(["read", "step", "truncate", "select", "clone", "drop", "fork"]),
                st.integers(0, 2**30),
            ),
            min_size=1,
            max_size=14,
        )
    )


@settings(max_examples=60, deadline=None)
@given(history=histories(), num_blocks=st.none() | st.just(200))
def test_any_history_of_caches_with_one_pool(history: list[tuple[str, Any]], num_blocks: int | None) -> None:
    pool = BlockPool(SIZE, num_blocks)
    plains = [start(pool, [21, 3])]
    for what, number in history:
        generator = torch.Generator().manual_seed(number)

        def draw(low: int, high: int, generator: torch.Generator = generator) -> int:
            return int(torch.randint(low, high + 1, (1,), generator=generator))

        plain = plains[draw(0, len(plains) - 1)]
        rows = len(plain.rows)
        plain.written += 300
        if what == "read":
            num_new = draw(1, 20)
            plain.read(num_new, [draw(0, num_new) for _ in range(rows)])
        elif what == "step":
            plain.read(1)
        elif what == "truncate":
            plain.truncate([draw(0, len(row)) for row in plain.rows])
        elif what == "select":
            plain.select([draw(0, rows - 1) for _ in range(draw(1, 4))])
        elif what == "clone":
            plains.append(Plain(plain.cache.clone(), [list(row) for row in plain.rows], plain.written + 9_000))
        elif what == "drop" and len(plains) > 1:
            plains.remove(plain)
        elif what == "fork":
            try_forks(plain, 3, [draw(0, 2) for _ in range(rows)])
        del plain
        count_holders(pool, *(each.cache for each in plains))
    for plain in plains:
        plain.read(1)


def try_forks(plain: Plain, num_forks: int, chosen: list[int]) -> None:
    """Candidates read over the rows, of which each keeps one: as a pass over that one."""
    rows, cache = len(plain.rows), plain.cache
    view = cache.fork(range(num_forks))
    new = torch.arange(rows * num_forks, dtype=torch.float32).view(-1, 1) + plain.written
    plain.written += new.numel()
    place = torch.arange(2 * HEADS * WIDTH, dtype=torch.float32).view(2, HEADS, WIDTH)
    span = view.begin(rows * num_forks, 1)
    mask = view.mask(span)
    assert isinstance(mask, torch.Tensor)
    for layer in range(LAYERS):
        keys, _ = view.write(layer, new[:, :, None, None, None] * 100 + place + layer * 50)
        seen = mask[:, 0, 0].repeat(rows * num_forks // mask.shape[0], 1)  # rows may be alike
        for fork in range(rows * num_forks):
            row, width = fork // num_forks, keys.shape[2]
            found = keys[row][0, seen[fork, :width], 0].tolist()
            assert found == [number * 100 + layer * 50 for number in [*plain.rows[row], float(new[fork, 0])]]
    view.end()
    cache.keep_fork(torch.tensor(chosen))
    plain.rows = [
        [*row, float(new[place * num_forks + fork, 0])]
        for place, (row, fork) in enumerate(zip(plain.rows, chosen, strict=True))
    ]
    assert cache.lengths == [len(row) for row in plain.rows]


# --- what captured steps ask ----------------------------------------------------------------------------------


def test_places_tell_the_blocks_of_every_row() -> None:
    """Steps that write by address, past the growth of the pool and of the table; rows part, leave and come twice."""
    pool = BlockPool(SIZE)
    plain = start(pool, [30, 5])
    cache = plain.cache
    for turn in range(300):
        if turn in (3, 90, 91):
            plain.select([1, 0, 1] if turn == 3 else [2, 2] if turn == 90 else [0, 1])
        rows = len(plain.rows)
        starts = list(cache.lengths)
        cache.advance(rows)
        places = cache.places()
        assert places is cache.places() and places.block_size == SIZE and not places.is_plain
        table = places.block_table
        for row, at in enumerate(starts):
            block = int(table[row, at // SIZE])
            assert block != NOBODYS and block == cache._store.tables[0].rows[row][at // SIZE]
            number = plain.written = plain.written + 1
            place = torch.arange(2 * HEADS * WIDTH, dtype=torch.float32).view(2, HEADS, WIDTH)
            for layer, buffer in enumerate(places.buffers):
                buffer[block, at % SIZE] = float(number) * 100 + place + layer * 50
            plain.rows[row] = [*plain.rows[row], float(number)]
        if turn % 50 == 0:
            plain.read(1)
    count_holders(pool, cache)


def test_a_look_at_places_tells_a_device_nothing() -> None:
    cache = PagedCache(BlockPool(SIZE, 40))
    plain = Plain(cache, [[], []])
    assert cache.last_places().buffers == []
    plain.read(5)
    places = cache.places()
    told = places.block_table.clone()
    cache.select_rows([1, 0])
    assert cache.last_places() is places and torch.equal(places.block_table, told)
    assert cache.places() is places and torch.equal(places.block_table[:2], told[:2].flip(0))


def test_places_stay_until_something_moves() -> None:
    cache = PagedCache(BlockPool(SIZE, 40))
    plain = Plain(cache, [[], []])
    assert cache.places().buffers == []
    plain.read(5)
    places = cache.places()
    for _ in range(100):
        cache.advance(2)
    assert cache.places() is places  # eight blocks a row more fit the table
    for _ in range(100):
        cache.advance(2)
    moved = cache.places()
    assert moved is not places and moved.block_table.shape[1] == 16
    with pytest.raises(SettingError, match="select_rows"):
        cache.advance(1)


# --- files --------------------------------------------------------------------------------------------------


def test_files_keep_what_rows_share(tmp_path: Path) -> None:
    from safetensors import safe_open
    from safetensors.torch import save_file

    path = tmp_path / "cache.safetensors"
    plain = start(BlockPool(SIZE), [40])
    plain.select([0, 0])
    plain.read(2, [0, 2])
    plain.cache.save(path)
    loaded = Cache.load(path)
    assert isinstance(loaded, PagedCache) and loaded.nbytes == plain.cache.nbytes == 4 * BLOCK_BYTES
    count_holders(loaded.pool, loaded)
    other = Plain(loaded, [list(row) for row in plain.rows], plain.written)
    other.read(1)
    other.read(20)
    with safe_open(str(path), framework="pt") as file:
        header, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    facts = '{"block_size": 16, "num_blocks": %s, "max_cache_len": null, "rows": %s}'
    for told in (
        facts % ("null", "[[0, 1, 2], [0, 1, 4]]"),
        facts % ("null", "[[0, 1, 2], [0, 1, -1]]"),
        facts % ("null", "[[0, 1, 2], [0, 1]]"),
        facts % ("null", '[[0, 1, 2], [0, 1, "3"]]'),
        facts % ("3", "[[0, 1, 2], [0, 1, 3]]"),
        facts % ("1e9", "[[0, 1, 2], [0, 1, 3]]"),
        (facts % ("null", "[[0, 1, 2], [0, 1, 3]]")).replace("16", "32"),
        "{}",
    ):
        save_file(tensors, path, {**header, "facts": told})
        with pytest.raises((LoadError, SettingError), match=r"damaged|num_blocks|taken over"):
            Cache.load(path)
