"""Kinds in blocks beside the plain one: windows that give blocks back, and blocks that are packed."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from tests.cache.plain_cache import LOSSLESS, WINDOW, Plain, join
from tests.conformance.cases import load_model

import unspool
from unspool.cache import KINDS, PagedCache, QuantizedCacheConfig
from unspool.cache.paged.joint import JointRows, let_go
from unspool.cache.paged.pool import NOBODYS
from unspool.errors import ResourceError, SettingError, UnsupportedError

SIZE = 16
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "drafts": {"prompt_lookup_num_tokens": 3},
    "contrastive": {"penalty_alpha": 0.6, "top_k": 4},
    "samples": {"do_sample": True, "seed": 11, "num_return_sequences": 3},
}


def prompts(length: int = 70) -> dict[str, Any]:
    ids = torch.randint(3, 160, (3, length), generator=torch.Generator().manual_seed(4))
    mask = torch.ones_like(ids)
    mask[0, :9], mask[1, :19] = 0, 0
    return {"input_ids": ids, "attention_mask": mask, "eos_token_id": None, "return_dict_in_generate": True}


@pytest.mark.parametrize("size", [16, 64])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["mistral", "gemma2", "llama"])
def test_windows_in_blocks_decode_as_with_every_key(name: str, way: str, size: int) -> None:
    model = load_model(name).model
    common = {**prompts(), "max_new_tokens": 30, **WAYS[way]}
    expected = unspool.generate(model, **common)
    found = unspool.generate(model, **common, cache_implementation="paged_hybrid", cache_config={"block_size": size})
    assert torch.equal(found.sequences, expected.sequences)
    if way == "greedy" and name != "llama":
        assert found.stats.path == expected.stats.path == "library"
        assert found.past_key_values.nbytes < expected.past_key_values.nbytes


@pytest.mark.parametrize(
    ("way", "group", "size", "nbits"),
    [*((way, 64, 64, 4) for way in WAYS), ("greedy", 64, 64, 8), ("greedy", 16, 16, 8), ("drafts", 16, 16, 4)],
)
def test_packed_blocks_decode_as_packed_rows(way: str, group: int, size: int, nbits: int) -> None:
    """Blocks of `q_group_size` positions are packed at the same time from the same numbers."""
    model = load_model("llama").model
    config: dict[str, Any] = {"nbits": nbits, "q_group_size": group, "residual_length": 10}
    common = {**prompts(), "max_new_tokens": 20, **WAYS[way]}
    expected = unspool.generate(model, **common, cache_implementation="quantized", cache_config=config)
    config["block_size"] = size
    found = unspool.generate(model, **common, cache_implementation="paged_quantized", cache_config=config)
    assert torch.equal(found.sequences, expected.sequences)
    if way == "greedy":
        assert found.past_key_values._store.num_packed == expected.past_key_values._store.layers[0].num_packed
        assert (found.stats.path == "library") == (size % 64 == 0)


def test_layers_share_one_pool_in_groups_of_one_size() -> None:
    kinds = ("sliding", "sliding", "sliding", "full", "sliding", "sliding", "full")
    cache = PagedCache(block_size=SIZE, kinds=kinds, window=8)
    assert [group.window for group in cache._store.groups] == [8, 8, None, 8]
    assert cache._store._homes == [(0, 0), (0, 1), (1, 0), (2, 0), (1, 1), (3, 0), (2, 1)]


def test_a_window_gives_its_blocks_back() -> None:
    cache = PagedCache(block_size=SIZE, kinds=("sliding", "full"), window=WINDOW)
    plain, pool = Plain(cache, [[]]), cache.pool
    plain.read(100)
    window, whole = cache._store.tables
    assert window.rows[0][:5] == [NOBODYS] * 5 and len(window.find_held()) == 2 and len(whole.find_held()) == 7
    assert pool.num_blocks - pool.num_free == 9
    with pytest.raises(UnsupportedError, match="row 0 can't roll back from 100 positions to 80: a window of 6 let go"):
        cache.truncate([80])
    plain.attempt(40, [7])
    plain.read(1)
    other = Plain(cache.new_empty(), [[]], written=5000)
    other.read(40)
    join(plain, other)
    plain.read(20)
    plain.select([1])
    plain.read(3)
    del other
    gc.collect()
    assert pool.num_blocks - pool.num_free == 4 + 1  # 63 positions, 6 in view


def test_rows_share_packed_blocks_until_they_part() -> None:
    cache = PagedCache(block_size=SIZE, cache_config=LOSSLESS)
    plain, packed = Plain(cache, [[]]), cache._store.packed_pool
    plain.read(40)
    assert cache._store.num_packed == [32] and packed.num_blocks - packed.num_free == 2
    plain.select([0, 0, 0])
    plain.read(10)
    assert (
        cache._store.num_packed == [48] * 3 and packed.num_blocks - packed.num_free == 5
    )  # each wrote its third block
    plain.select([1, 1])
    for _ in range(16):
        plain.read(1)
    other = Plain(cache.new_empty(), [[]], written=9000)
    other.read(35)
    join(plain, other)
    clone = Plain(cache.clone(), [list(row) for row in plain.rows], plain.written + 5000)
    plain.truncate([37, 66, 20])  # into packed blocks
    plain.read(30)
    clone.read(30)
    del other, clone
    plain.select([])
    gc.collect()
    assert packed.num_free == packed.num_blocks and cache.pool.num_free == cache.pool.num_blocks


def test_plain_blocks_that_rows_share_are_packed_once() -> None:
    cache = PagedCache(block_size=SIZE, cache_config=QuantizedCacheConfig("unspool", 8, 0, 1, 16, 32))
    plain, packed = Plain(cache, [[]]), cache._store.packed_pool
    span = cache.begin(1, 40)
    for layer in range(2):
        cache.write(layer, torch.randn(1, 40, 2, 2, 3))
    cache.end()
    assert span.stop == 40 and cache._store.num_packed == [0]
    cache.select_rows([0] * 4)
    for _ in range(8):
        cache.begin(4, 1)
        for layer in range(2):
            cache.write(layer, torch.randn(4, 1, 2, 2, 3))
        cache.end()
    assert cache._store.num_packed == [16] * 4 and packed.num_blocks - packed.num_free == 1
    assert plain.cache is cache


def test_a_pool_of_packed_blocks_that_is_full_refuses_a_pass_and_keeps_what_it_has() -> None:
    cache = PagedCache(block_size=SIZE, num_blocks=2, cache_config=LOSSLESS)
    plain = Plain(cache, [[]])
    plain.read(33)
    with pytest.raises(ResourceError, match="1 are missing"):
        cache.begin(1, 20)
    assert cache.lengths == [33] and cache.room == 34
    plain.read(1)


def test_what_blocks_can_not_be() -> None:
    with pytest.raises(SettingError, match="`block_size`=16 must be a multiple of `q_group_size`=64"):
        PagedCache(block_size=16, cache_config=QuantizedCacheConfig("unspool"))
    with pytest.raises(SettingError, match="pools of its own"):
        PagedCache(unspool.BlockPool(64), cache_config=QuantizedCacheConfig("unspool"))
    with pytest.raises(SettingError, match="rows of windows"):
        one = PagedCache(block_size=16, kinds=("sliding",), window=4)
        Plain(two := PagedCache(block_size=16, kinds=("sliding",), window=5), [[]]).cache.begin(1, 1)
        two.write(0, torch.zeros(1, 1, 2, 2, 3))
        two.end()
        one.join(two)
    model = load_model("llama").model
    with pytest.raises(SettingError, match="must be a multiple"):
        unspool.generate(
            model, [[5, 6]], cache_implementation="paged_quantized", cache_config={"block_size": 16}, max_new_tokens=2
        )
    with pytest.raises(UnsupportedError, match="begin\\(\\), write\\(\\) and end\\(\\)"):
        PagedCache(cache_config=LOSSLESS).update(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4), 0)
    assert {"paged", "paged_hybrid", "paged_quantized"} <= set(KINDS)


@pytest.mark.parametrize("kind", ["hybrid", "quantized", "plain"])
def test_rows_of_several_caches_are_read_together(kind: str) -> None:
    """A joint pass leaves every cache as passes of its own would; long ones, steps and rows that leave in between."""
    more: dict[str, Any] = {
        "hybrid": {"kinds": ("sliding", "full"), "window": WINDOW},
        "quantized": {"cache_config": LOSSLESS},
        "plain": {},
    }[kind]
    first = PagedCache(block_size=SIZE, **more)
    caches = [first, first.new_empty(), first.new_empty()]
    plains = [Plain(cache, [[] for _ in range(rows)]) for cache, rows in zip(caches, (1, 2, 1), strict=True)]
    plains[1].read(7, [7, 3])
    joint = JointRows(first.new_empty())
    for num_new, counts in ((40, [40, 20, 3, 0]), (1, None), (1, None), (17, [2, 17, 17, 17]), (1, None)):
        whole = Plain(joint.begin(caches, [1, 2, 1]), [row for plain in plains for row in plain.rows], 4000)
        whole.written += max(plain.written for plain in plains)
        whole.read(num_new, counts)
        joint.end()
        for plain, (start, stop) in zip(plains, ((0, 1), (1, 3), (3, 4)), strict=True):
            plain.rows, plain.written = whole.rows[start:stop], whole.written
            assert plain.cache.lengths == [len(row) for row in plain.rows]
        plains[1].read(1)
        plains[2].read(2)
    plains[1].select([1])
    del whole
    for plain in plains:
        plain.read(20)
        let_go(plain.cache)
    pools = {id(table.pool): table.pool for cache in caches for table in cache._store.tables}.values()
    assert all(pool.num_free == pool.num_blocks for pool in pools)
