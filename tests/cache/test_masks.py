"""Masks of every kind of cache are their definition, and take no tensor if none is needed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.cache.plain_cache import (
    HEADS,
    IN_ORDER,
    KINDS,
    LAYERS,
    WIDTH,
    WINDOW,
    define,
    spread,
)

from unspool.cache import (
    Cache,
)


@pytest.mark.parametrize("kind", IN_ORDER)
@settings(max_examples=30)
@given(
    starts=st.lists(st.integers(0, 12), min_size=1, max_size=4),
    num_new=st.integers(1, 6),
    window=st.none() | st.integers(1, 20),
)
def test_mask_is_its_definition(kind: str, starts: list[int], num_new: int, window: int | None) -> None:
    cache = KINDS[kind]()
    if max(starts) > 0:
        cache.begin(len(starts), max(starts), starts)
        cache.write(0, torch.zeros(len(starts), max(starts), 2, HEADS, WIDTH))
        cache.end()
    span = cache.begin(len(starts), num_new)
    mask = cache.mask(span, window)
    assert torch.equal(spread(mask, span), define(span, window))


def test_plain_masks_take_no_tensor(in_order: Cache) -> None:
    """The two cases every step meets must stay free: a first prompt is causal, a single step sees everything."""
    cache = in_order
    span = cache.begin(2, 5)
    assert cache.mask(span) == "causal"
    assert cache.mask(span, window=5) == "causal"
    assert isinstance(cache.mask(span, window=4), torch.Tensor)
    cache.end()
    assert cache.mask(cache.begin(2, 1)) is None


@pytest.mark.parametrize("kind", ["sliding", "hybrid", "sink"])
def test_masks_of_rings_take_no_tensor(kind: str) -> None:
    cache = KINDS[kind]()
    for num_new in (4, 1, 1, 1, 1, 1, 1, 1):
        span = cache.begin(2, num_new)
        window = None if kind == "sink" else WINDOW  # sinks leave the windows that layers have of their own
        assert cache.mask(span, window) == ("causal" if num_new > 1 else None)
        for layer in range(LAYERS):
            cache.write(layer, torch.zeros(2, num_new, 2, HEADS, WIDTH))
        cache.end()
