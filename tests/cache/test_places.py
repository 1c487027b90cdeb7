"""What captured steps ask of caches: where keys lie, one position more, and an ancestry instead of copies."""

from __future__ import annotations

import pytest
import torch

from unspool.cache import BranchingCache, Cache, DynamicCache, EncoderDecoderCache, StaticCache
from unspool.errors import SettingError, UnsupportedError
from unspool.models.native import ModelConfig

LAYERS, HEADS, WIDTH = 2, 2, 4


def fill(cache: DynamicCache, rows: int, num_new: int, counts: list[int] | None = None) -> None:
    cache.begin(rows, num_new, counts)
    for layer in range(LAYERS):
        cache.write(layer, torch.randn(rows, num_new, 2, HEADS, WIDTH))
    cache.end()


def test_places_stay_until_a_buffer_moves() -> None:
    cache = DynamicCache()
    fill(cache, 3, 5)
    first = cache.places()
    assert first is not None and len(first.buffers) == LAYERS
    cache.advance(3)
    assert cache.places() is first and cache.lengths == [6, 6, 6] and cache.get_seq_length() == 6
    cache.select_rows([2, 0])
    moved = cache.places()
    assert moved is not first and moved.buffers[0].shape[0] == 2
    for _ in range(300):
        cache.advance(2)
    assert cache.places() is not moved and cache.places().buffers[0].shape[1] >= 306


def test_an_advance_checks_rows_and_room() -> None:
    cache = StaticCache(
        ModelConfig(num_attention_heads=HEADS, hidden_size=HEADS * WIDTH, num_hidden_layers=LAYERS), 2, 3
    )
    for length in (1, 2, 3):
        cache.advance(2)
        assert cache.lengths == [length, length]
    with pytest.raises(SettingError, match="does not fit"):
        cache.advance(2)
    with pytest.raises(SettingError, match="select_rows"):
        cache.advance(1)


def test_a_kind_that_stores_in_its_own_way_has_no_places() -> None:
    class Odd(DynamicCache):
        def write(self, layer: int, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return super().write(layer, kv)

    cache = Odd()
    fill(cache, 1, 2)
    assert cache.places() is None


def write_by_address(cache: BranchingCache, kv: list[torch.Tensor]) -> None:
    """What a captured step does: the new position goes into each row's own buffer."""
    cache.advance(kv[0].shape[0])
    places = cache.places()
    assert places is not None
    place = cache._own.lengths[0] - 1
    for buffer, new in zip(places.buffers, kv, strict=True):
        buffer[:, place] = new[:, 0]


def test_an_ancestry_is_what_copies_would_be() -> None:
    """Branches that are reordered at every step, past the growth of their buffers."""
    torch.manual_seed(0)
    prompts = [DynamicCache(), DynamicCache()]
    prompt = torch.randn(LAYERS, 2, 7, 2, HEADS, WIDTH)
    for cache in prompts:
        cache.begin(2, 7, [7, 4])
        for layer in range(LAYERS):
            cache.write(layer, prompt[layer])
        cache.end()
    copied, followed = (BranchingCache(cache, 3) for cache in prompts)
    generator = torch.Generator().manual_seed(1)
    for step in range(270):
        kv = [torch.randn(6, 1, 2, HEADS, WIDTH) for _ in range(LAYERS)]
        for cache in (copied, followed) if step == 0 else (copied,):
            cache.begin(6, 1)
            for layer in range(LAYERS):
                cache.write(layer, kv[layer])
            cache.end()
        if step > 0:
            assert followed.places() is not None
            write_by_address(followed, kv)
        index = torch.cat([torch.randint(0, 3, (3,), generator=generator) + first for first in (0, 3)]).tolist()
        copied.select_rows(index)
        followed.select_rows(index)
        assert copied.lengths == followed.lengths
    for mine, theirs in zip(followed.merge(), copied.merge(), strict=True):
        assert torch.equal(mine[0], theirs[0]) and torch.equal(mine[1], theirs[1])


def test_a_kind_without_places_refuses_to_advance() -> None:
    class Written(DynamicCache):
        """A kind that knows no addresses."""

        places = Cache.places

    assert Written().places() is None
    with pytest.raises(UnsupportedError, match="begin"):
        Written().advance(1)


def test_a_pair_advances_its_decoders_part() -> None:
    pair = EncoderDecoderCache(DynamicCache(), DynamicCache())
    pair.advance(2)
    assert pair.lengths == pair.self_attention_cache.lengths == [1, 1] and pair.cross_attention_cache.lengths == []
