"""The cache in blocks: what rows share, and what they give back."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.cache.blocks import count_holders, start
from tests.cache.plain_cache import HEADS, LAYERS, WIDTH, Plain

from unspool.cache import BlockPool, Cache, PagedCache
from unspool.cache.paged.pool import NOBODYS
from unspool.errors import LoadError, ResourceError, SettingError

SIZE = 16  # positions of a block, here
BLOCK_BYTES = LAYERS * SIZE * 2 * HEADS * WIDTH * 4


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


@settings(max_examples=30)
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
        header, names = file.metadata(), file.keys()
        tensors = {name: file.get_tensor(name) for name in names}
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
