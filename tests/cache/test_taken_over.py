"""Keys that a cache takes over from where they were made."""

from __future__ import annotations

import pytest
import torch

from unspool.cache import DynamicCache
from unspool.errors import SettingError


def take_over(lengths: list[int]) -> tuple[DynamicCache, torch.Tensor]:
    made = torch.randn(2, len(lengths), max(lengths), 2, 3, 4)  # layers first
    cache = DynamicCache()
    cache.take_over(made, lengths)
    return cache, made


def test_they_are_not_copied() -> None:
    cache, made = take_over([5, 3])
    assert cache.lengths == [5, 3] and len(cache) == 2
    places = cache.places()
    assert places is not None and places.buffers[1].data_ptr() == made[1].data_ptr()
    for layer, (keys, values) in enumerate(cache):
        assert torch.equal(torch.stack((keys, values)), made[layer].permute(2, 0, 3, 1, 4))


@pytest.mark.parametrize("index", [[1], [0, 0, 1], [1, 0]])
def test_rows_follow(index: list[int]) -> None:
    cache, made = take_over([5, 3])
    cache.select_rows(index)
    assert cache.lengths == [[5, 3][row] for row in index]
    for layer, (keys, _) in enumerate(cache):
        held = max(cache.lengths)
        assert torch.equal(keys[:, :, :held], made[layer][index, :held, 0].transpose(1, 2))


def test_rows_that_stay_keep_their_memory() -> None:
    """More than half of it; layers share what they were made in."""
    cache, made = take_over([5, 3, 4])
    before = made.clone()
    cache.select_rows([0, 2])
    places = cache.places()
    assert places is not None and [one.data_ptr() for one in places.buffers] == [one.data_ptr() for one in made]
    assert torch.equal(cache.rows_of(1)[:, :4], before[1, [0, 2], :4])


def test_rows_join() -> None:
    cache, made = take_over([5, 3])
    other, more = take_over([7])
    cache.join(other)
    assert cache.lengths == [5, 3, 7]
    keys = [layer[0] for layer in cache]
    assert torch.equal(keys[1][0, :, :5], made[1, 0, :, 0].transpose(0, 1))
    assert torch.equal(keys[1][2, :, :7], more[1, 0, :, 0].transpose(0, 1))


def test_a_cache_in_use_takes_nothing_over() -> None:
    cache, made = take_over([5, 3])
    with pytest.raises(SettingError, match="use a new one"):
        cache.take_over(made, [5, 3])
