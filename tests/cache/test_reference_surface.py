"""The names that code written for the reference calls, beside the reference's own results."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import DynamicCache as ReferenceDynamic
from transformers import EncoderDecoderCache as ReferencePair
from transformers import LlamaConfig
from transformers import StaticCache as ReferenceStatic

from unspool.cache import DynamicCache, EncoderDecoderCache, StaticCache
from unspool.errors import SettingError

ROWS, HEADS, WIDTH, LAYERS = 3, 2, 4, 2
SIZES = {"num_attention_heads": HEADS, "hidden_size": HEADS * WIDTH, "num_hidden_layers": LAYERS}


def make_states(num_new: int, seed: int = 0, rows: int = ROWS) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values (rows, heads, new, width), a layer each."""
    generator = torch.Generator().manual_seed(seed)
    shape = (LAYERS, 2, rows, HEADS, num_new, WIDTH)
    return [(layer[0], layer[1]) for layer in torch.randn(shape, generator=generator)]


def fill(cache: object, *lengths: int) -> None:
    for seed, num_new in enumerate(lengths):
        for layer, (keys, values) in enumerate(make_states(num_new, seed)):
            cache.update(keys, values, layer)


def assert_same(found: DynamicCache, reference: ReferenceDynamic) -> None:
    assert len(found) == len(reference)
    for layer, (keys, values) in enumerate(found):
        assert torch.equal(keys, reference.layers[layer].keys)
        assert torch.equal(values, reference.layers[layer].values)
        assert found.get_seq_length(layer) == reference.get_seq_length(layer)


@pytest.fixture
def both() -> tuple[DynamicCache, ReferenceDynamic]:
    found, reference = DynamicCache(), ReferenceDynamic()
    fill(found, 5, 1)
    fill(reference, 5, 1)
    return found, reference


def test_update_returns_everything_held() -> None:
    found, reference = DynamicCache(), ReferenceDynamic()
    for seed, num_new in enumerate((255, 1, 1, 3)):  # across the border of the first chunk
        for layer, (keys, values) in enumerate(make_states(num_new, seed)):
            mine, theirs = found.update(keys, values, layer), reference.update(keys, values, layer)
            assert torch.equal(mine[0], theirs[0]) and torch.equal(mine[1], theirs[1])
            assert found.get_seq_length(layer) == reference.get_seq_length(layer)
    assert_same(found, reference)


def test_empty() -> None:
    cache = DynamicCache()
    assert (len(cache), cache.get_seq_length(), cache.get_max_cache_shape(), list(cache)) == (0, 0, None, [])
    with pytest.raises(KeyError, match="has 0 layers"):
        cache[0]


def test_views(both: tuple[DynamicCache, ReferenceDynamic]) -> None:
    found, reference = both
    for layer in range(LAYERS):
        keys, values = reference.layers[layer].keys, reference.layers[layer].values
        assert torch.equal(found.key_cache[layer], keys) and torch.equal(found.value_cache[layer], values)
        assert torch.equal(found[layer][0], keys) and torch.equal(found[layer][1], values)
    assert len(found.key_cache) == len(found.value_cache) == LAYERS
    assert found.get_usable_length(7) == found.get_seq_length() == 6


@pytest.mark.parametrize("index", [[2, 0, 1], [1, 1, 0], [0, 1, 2]])
def test_reorder(both: tuple[DynamicCache, ReferenceDynamic], index: list[int]) -> None:
    for cache in both:
        cache.reorder_cache(torch.tensor(index))
        fill(cache, 2)
    assert_same(*both)


def test_repeat_interleave(both: tuple[DynamicCache, ReferenceDynamic]) -> None:
    for cache in both:
        cache.batch_repeat_interleave(3)
    assert_same(*both)
    assert both[0].lengths == [6] * 9


@pytest.mark.parametrize("index", [[2], [0, 2], [1, 1, 2, 0]])
def test_select_indices(both: tuple[DynamicCache, ReferenceDynamic], index: list[int]) -> None:
    for cache in both:
        cache.batch_select_indices(torch.tensor(index))
    assert_same(*both)


@pytest.mark.parametrize("number", [-1, -4])
def test_crop_from_the_end(both: tuple[DynamicCache, ReferenceDynamic], number: int) -> None:
    for cache in both:
        cache.crop(number)
        fill(cache, 2)
    assert_same(*both)


@pytest.mark.parametrize(("number", "left"), [(0, 0), (1, 1), (4, 4), (6, 6), (60, 6)])
def test_crop_to_a_length(both: tuple[DynamicCache, ReferenceDynamic], number: int, left: int) -> None:
    found, reference = both
    found.crop(number)
    assert found.get_seq_length() == left
    for layer, (keys, values) in enumerate(found):
        assert torch.equal(keys, reference.layers[layer].keys[:, :, :left])
        assert torch.equal(values, reference.layers[layer].values[:, :, :left])


def test_crop_below_nothing(both: tuple[DynamicCache, ReferenceDynamic]) -> None:
    with pytest.raises(SettingError, match=r"crop\(-7\) asks for more than the 6"):
        both[0].crop(-7)


def test_legacy_round_trip(both: tuple[DynamicCache, ReferenceDynamic]) -> None:
    found, reference = both
    legacy = found.to_legacy_cache()
    assert isinstance(legacy, tuple) and all(len(pair) == 2 for pair in legacy)
    again = DynamicCache.from_legacy_cache(legacy)
    assert_same(again, reference)
    assert_same(DynamicCache(legacy), reference)
    for cache in (again, reference):
        fill(cache, 2)
    assert_same(again, reference)
    assert found.get_seq_length() == 6  # the copy grew, not the first
    assert len(DynamicCache.from_legacy_cache(None)) == 0


def test_splits_and_back(both: tuple[DynamicCache, ReferenceDynamic]) -> None:
    found, reference = both
    parts = found.batch_split(ROWS, 2)
    assert [part.lengths for part in parts] == [[6, 6], [6]]
    for layer in range(LAYERS):
        assert torch.equal(parts[0][layer][0], found[layer][0][:2])
        assert torch.equal(parts[1][layer][1], found[layer][1][2:])
    assert_same(DynamicCache.from_batch_splits(parts), reference)


def test_splits_of_ragged_rows_keep_their_lengths() -> None:
    cache = DynamicCache()
    cache.begin(ROWS, 4, [4, 1, 2])
    for layer in range(LAYERS):
        cache.write(layer, torch.randn(ROWS, 4, 2, HEADS, WIDTH))
    cache.end()
    parts = cache.batch_split(ROWS, 1)
    parts[0].select_rows([0, 0])
    whole = DynamicCache.from_batch_splits(parts)
    assert whole.lengths == [4, 4, 1, 2]
    assert torch.equal(whole[1][0][3, :, :2], cache[1][0][2, :, :2])
    with pytest.raises(SettingError, match=r"\[4, 1, 2\] positions, and tuples"):
        cache.to_legacy_cache()
    with pytest.raises(SettingError, match="rows of one length"):
        fill(cache, 1)


def test_update_keeps_its_rows() -> None:
    cache = DynamicCache()
    fill(cache, 2)
    with pytest.raises(SettingError, match="for 1 given"):
        cache.update(*make_states(1, rows=1)[0], 0)


# --- static -------------------------------------------------------------------------------------------------


def make_static(max_cache_len: int = 8, rows: int = ROWS) -> StaticCache:
    return StaticCache(SimpleNamespace(**SIZES, num_key_value_heads=HEADS, head_dim=WIDTH), rows, max_cache_len)


def test_static_update_writes_where_it_is_told() -> None:
    """With `cache_position`, keys land there, and the whole buffers come back."""
    found = make_static()
    expected = [torch.zeros(2, ROWS, HEADS, 8, WIDTH) for _ in range(LAYERS)]
    for seed, positions in enumerate(([0, 1, 2, 3, 4], [5], [2, 3])):
        where = torch.tensor(positions)
        for layer, (keys, values) in enumerate(make_states(len(positions), seed)):
            expected[layer][0][:, :, where], expected[layer][1][:, :, where] = keys, values
            mine = found.update(keys, values, layer, {"cache_position": where})
            assert mine[0].shape == (ROWS, HEADS, 8, WIDTH)
            assert torch.equal(mine[0], expected[layer][0]) and torch.equal(mine[1], expected[layer][1])
    assert (found.get_seq_length(), found.get_max_cache_shape()) == (6, 8)
    assert found.get_usable_length(1) == 6 and found.get_usable_length(4) == 4


def test_static_update_without_positions_goes_on_like_the_reference() -> None:
    reference = ReferenceStatic(LlamaConfig(**SIZES), max_cache_len=8)
    found = make_static()
    for seed, num_new in enumerate((4, 1, 2)):
        for layer, (keys, values) in enumerate(make_states(num_new, seed)):
            mine, theirs = found.update(keys, values, layer), reference.update(keys, values, layer)
            assert torch.equal(mine[0], theirs[0]) and torch.equal(mine[1], theirs[1])
    assert found.get_seq_length() == int(reference.get_seq_length()) == 7
    found.reorder_cache(torch.tensor([2, 0, 1]))
    reference.reorder_cache(torch.tensor([2, 0, 1]))
    assert torch.equal(found[1][0], reference.layers[1].keys[:, :, :7])


def test_static_takes_fewer_rows_than_it_has() -> None:
    found = make_static(rows=5)
    keys, values = make_states(3)[0]
    assert found.update(keys, values, 0)[0].shape == (ROWS, HEADS, 8, WIDTH)
    with pytest.raises(SettingError, match="4 rows do not fit"):
        make_static().update(*make_states(1, rows=4)[0], 0)
    with pytest.raises(SettingError, match="position 9 does not fit"):
        make_static().update(*make_states(9)[0], 0)


def test_static_forgets_and_keeps_its_memory() -> None:
    found = make_static()
    fill(found, 3)
    before = [buffer.data_ptr() for buffer in found._buffers]
    found.reset()
    assert (found.get_seq_length(), found.lengths) == (0, [])
    keys, _ = found.update(*make_states(1, rows=2)[0], 0)
    assert keys.shape[0] == 2 and not keys[:, :, 1:].any()
    assert [buffer.data_ptr() for buffer in found._buffers] == before


def test_static_reads_its_sizes_from_a_config() -> None:
    config = SimpleNamespace(**SIZES, num_key_value_heads=1, head_dim=7, max_position_embeddings=11)
    cache = StaticCache(config, 2, dtype=torch.bfloat16)
    kv = torch.zeros(2, 1, 3, 7, dtype=torch.bfloat16)
    keys, _ = cache.update(kv, kv, 0)
    assert (keys.shape, keys.dtype, cache.max_cache_len, len(cache)) == ((2, 1, 11, 7), torch.bfloat16, 11, LAYERS)


# --- the pair -----------------------------------------------------------------------------------------------


def make_pairs() -> tuple[EncoderDecoderCache, ReferencePair]:
    pairs = []
    for kind, pair in ((DynamicCache, EncoderDecoderCache), (ReferenceDynamic, ReferencePair)):
        own, cross = kind(), kind()
        fill(own, 2)
        fill(cross, 5)
        pairs.append(pair(own, cross))
    return pairs[0], pairs[1]


def assert_same_pair(found: EncoderDecoderCache, reference: ReferencePair) -> None:
    assert_same(found.self_attention_cache, reference.self_attention_cache)
    assert_same(found.cross_attention_cache, reference.cross_attention_cache)


def test_pair_follows_the_reference() -> None:
    found, reference = make_pairs()
    assert found.is_updated == reference.is_updated == {0: True, 1: True}
    assert len(found) == len(reference) and found.get_seq_length() == reference.get_seq_length() == 2
    assert found.source_lengths == [5, 5, 5]
    for change in (
        lambda pair: pair.reorder_cache(torch.tensor([2, 1, 0])),
        lambda pair: pair.batch_select_indices(torch.tensor([0, 2])),
        lambda pair: pair.batch_repeat_interleave(2),
        lambda pair: pair.crop(-1),
    ):
        change(found), change(reference)
        assert_same_pair(found, reference)


def test_pair_is_not_updated_before_it_is_written() -> None:
    found, reference = (
        pair(kind(), kind()) for pair, kind in ((EncoderDecoderCache, DynamicCache), (ReferencePair, ReferenceDynamic))
    )
    assert found.is_updated == reference.is_updated == {}
    assert EncoderDecoderCache(DynamicCache(), make_static()).is_updated == {0: False, 1: False}


def test_pair_legacy_round_trip() -> None:
    found, reference = make_pairs()
    legacy = found.to_legacy_cache()
    assert [len(layer) for layer in legacy] == [4, 4]
    for mine, own, cross in zip(legacy, found.self_attention_cache, found.cross_attention_cache, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, (*own, *cross), strict=True))
    assert_same_pair(EncoderDecoderCache.from_legacy_cache(legacy), reference)
    assert [torch.equal(a[3], b[3]) for a, b in zip(found, legacy, strict=True)] == [True, True]
    own_only = EncoderDecoderCache.from_legacy_cache(tuple(layer[:2] for layer in legacy))
    assert (own_only.get_seq_length(), len(own_only.cross_attention_cache)) == (2, 0)
    assert [len(layer) for layer in own_only] == [2, 2]


def test_pair_splits_and_back() -> None:
    found, reference = make_pairs()
    parts = found.batch_split(ROWS, 2)
    assert [(part.lengths, part.source_lengths) for part in parts] == [([2, 2], [5, 5]), ([2], [5])]
    assert_same_pair(EncoderDecoderCache.from_batch_splits(parts), reference)


def test_pair_reset_and_what_static_parts_can_not() -> None:
    pair = EncoderDecoderCache(make_static(), make_static())
    fill(pair, 2)
    assert (pair.get_seq_length(), pair.get_max_cache_shape()) == (2, 8)
    pair.reset()
    assert pair.get_seq_length() == 0 and pair.is_updated == {0: False, 1: False}
    with pytest.raises(ValueError, match="crop needs two dynamic caches, and these are StaticCache and StaticCache"):
        pair.crop(1)
