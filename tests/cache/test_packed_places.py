"""Captured steps over quantised caches, as the cache sees them: written by address, packed between steps."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from unspool.cache import QuantizedCache, QuantizedCacheConfig, QuantizedHybridCache, QuantizedStaticCache
from unspool.errors import SettingError

LAYERS, HEADS, WIDTH, GROUP, RESIDUAL = 2, 2, 8, 4, 6
CONFIG = QuantizedCacheConfig("unspool", nbits=4, axis_value=1, q_group_size=GROUP, residual_length=RESIDUAL)
SIZES = SimpleNamespace(num_hidden_layers=LAYERS, num_attention_heads=HEADS, head_dim=WIDTH)
KINDS: dict[str, Callable[[], Any]] = {
    "grows": lambda: QuantizedCache(CONFIG),
    "static": lambda: QuantizedStaticCache(CONFIG, SIZES, 3, 600),
}


def fill(cache: QuantizedCache, kv: torch.Tensor, counts: list[int] | None = None) -> None:
    cache.begin(kv.shape[0], kv.shape[1], counts)
    for layer in range(LAYERS):
        cache.write(layer, kv + layer)
    cache.end()


def step(cache: QuantizedCache, kv: torch.Tensor) -> None:
    """What a captured step does with keys (rows, 1, 2, heads, width)."""
    starts = cache.lengths or [0] * kv.shape[0]
    cache.advance(kv.shape[0])
    places = cache.places()
    assert places is not None and places.packed is not None
    for layer, recent in enumerate(places.buffers):
        for row, (start, packed) in enumerate(zip(starts, places.packed.num_packed, strict=True)):
            recent[row, start - packed] = kv[row, 0] + layer


def read(cache: QuantizedCache) -> list[list[torch.Tensor]]:
    """What is held of each layer and row, packed and not."""
    found = []
    for store in cache._store.layers:
        for row, (length, packed) in enumerate(zip(cache.lengths, store.num_packed, strict=True)):
            assert 0 <= length - packed <= store.recent.shape[1]
            blocks = [each.narrow(0, packed).rows(slice(row, row + 1)) for each in (store.keys, store.values)]
            found.append([*(t for each in blocks for t in each.tensors()), store.recent[row, : length - packed]])
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_steps_by_address_leave_what_passes_leave(kind: str) -> None:
    """Ragged rows over many blocks, rows that move, a roll back: at last the same is packed, and the same is not."""
    generator = torch.Generator().manual_seed(0)
    cache, other = KINDS[kind](), KINDS[kind]()
    prompt = torch.randn(3, 13, 2, HEADS, WIDTH, generator=generator)
    for each in (cache, other):
        fill(each, prompt, [13, 2, 7])
    for number in range(300):
        kv = torch.randn(len(cache.lengths), 1, 2, HEADS, WIDTH, generator=generator)
        step(cache, kv)
        fill(other, kv)
        if number == 50:
            cache.select_rows([2, 0, 1]), other.select_rows([2, 0, 1])
        if number == 120:
            cache.truncate([length - 2 for length in cache.lengths])
            other.truncate([length - 2 for length in other.lengths])
        if number == 200:
            cache.select_rows([1, 0]), other.select_rows([1, 0])
    fill(cache, kv), fill(other, kv)  # a pass by operators packs what the last step left
    assert cache.lengths == other.lengths and cache._store.layers[0].num_packed == other._store.layers[0].num_packed
    assert min(cache._store.layers[0].num_packed) > 280
    for mine, theirs in zip(read(cache), read(other), strict=True):
        assert all(map(torch.equal, mine, theirs))


@pytest.mark.parametrize("kind", KINDS)
def test_places_change_with_what_is_packed_or_moved_and_with_nothing_else(kind: str) -> None:
    cache = KINDS[kind]()
    fill(cache, torch.randn(2, 10, 2, HEADS, WIDTH))
    seen = []
    for _ in range(9):
        step(cache, torch.randn(2, 1, 2, HEADS, WIDTH))
        seen.append(cache.places())
    # Of 10 positions 4 are packed; the step after the 14th packs 4 more, and the one after the 18th.
    assert [places.packed.num_packed[0] for places in seen] == [4, 4, 4, 4, 8, 8, 8, 8, 12]
    assert all((mine is other) == (n % 4 != 3) for n, (mine, other) in enumerate(pairwise(seen)))
    cache.select_rows([1])
    assert cache.places() is not seen[-1] and cache.places() is cache.places()


def test_a_trial_packs_nothing_until_it_ends() -> None:
    cache = QuantizedCache(CONFIG)
    fill(cache, torch.randn(1, 10, 2, HEADS, WIDTH))
    cache.begin_trial()
    for _ in range(9):
        step(cache, torch.randn(1, 1, 2, HEADS, WIDTH))
    assert cache._store.layers[0].num_packed == [4]
    cache.truncate([18])
    assert cache._store.layers[0].num_packed == [12]


def test_rows_and_room_are_checked() -> None:
    cache = QuantizedStaticCache(CONFIG, SIZES, 2, 3)
    with pytest.raises(SettingError, match="3 rows do not fit"):
        cache.advance(3)
    for _ in range(3):
        step(cache, torch.randn(1, 1, 2, HEADS, WIDTH))
    with pytest.raises(SettingError, match="does not fit"):
        cache.advance(1)
    with pytest.raises(SettingError, match="select_rows"):
        cache.advance(2)
    assert cache.lengths == [3]


def test_packed_windows_say_which_layers_slide() -> None:
    sizes = SimpleNamespace(**vars(SIZES), sliding_window=8, layer_types=["sliding_attention", "full_attention"])
    cache = QuantizedHybridCache(CONFIG, sizes, 1, 40)
    for num_new in (9, 30):
        cache.begin(1, num_new)
        for layer in range(2):
            cache.write(layer, torch.zeros(1, num_new, 2, 2, 8))
        cache.end()
    places = cache.places()
    assert places is not None and places.packed is not None
    assert (places.packed.sliding, places.packed.num_packed) == ([True, False], cache._store.layers[0].first_recent)
    assert places.packed.bases == cache._store.layers[0].bases
    assert cache.longest_stretch == 0  # a window packs where each pass ends
