"""Where rings tell a captured step that their keys lie."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from unspool.cache import HybridCache, SlidingWindowCache
from unspool.errors import SettingError

KINDS = ["sliding_attention", "full_attention", "sliding_attention"]


def make_hybrid() -> HybridCache:
    config = SimpleNamespace(
        num_hidden_layers=3, num_attention_heads=2, head_dim=8, hidden_size=16, sliding_window=5, layer_types=KINDS
    )
    return HybridCache(config, 2, 12)


def read(cache: HybridCache | SlidingWindowCache, num_new: int) -> None:
    cache.begin(2, num_new)
    for layer in range(3):
        cache.write(layer, torch.randn(2, num_new, 2, 2, 8))
    cache.end()


def test_positions_begin_anew_where_a_layer_ends() -> None:
    """What a pass writes stands where the rooms say: position j at place j % room of each layer's buffer."""
    cache = make_hybrid()
    for num_new in (7, 1, 1):
        read(cache, num_new)
    before = [buffer.clone() for buffer in cache._held_tensors()]
    written = []
    cache.begin(2, 1)
    for layer in range(3):
        written.append(torch.randn(2, 1, 2, 2, 8))
        cache.write(layer, written[-1])
    cache.end()
    places = cache.places()
    assert places is not None and places.rooms == [5, 12, 5] and not places.is_plain
    assert cache.places() is places
    for room, buffer, old, new in zip(places.rooms, places.buffers, before, written, strict=True):
        assert buffer.shape[1] == room
        assert torch.equal(buffer[:, 9 % room], new[:, 0])
        rest = [place for place in range(room) if place != 9 % room]
        assert torch.equal(buffer[:, rest], old[:, rest])


def test_steps_are_counted() -> None:
    cache = make_hybrid()
    read(cache, 10)
    cache.advance(2)
    assert cache.lengths == [11, 11] and cache.get_seq_length() == 11
    cache.advance(2)
    with pytest.raises(SettingError, match="position 13 does not fit a HybridCache of 12"):
        cache.advance(2)
    with pytest.raises(SettingError, match="2 rows and the step has 1"):
        cache.advance(1)


def test_a_trial_keeps_what_it_writes_over_so_no_step_writes_by_address() -> None:
    cache = make_hybrid()
    read(cache, 8)
    cache.begin_trial()
    assert cache.places() is None
    read(cache, 2)
    cache.truncate([8, 9])
    assert cache.places() is not None
