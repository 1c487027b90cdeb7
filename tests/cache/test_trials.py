"""Tokens that are tried and taken back, in every kind of cache that can."""

from __future__ import annotations

import pytest
from tests.cache.plain_cache import (
    KINDS,
    Plain,
)

from unspool.cache import (
    Cache,
    QuantizedHybridCache,
)
from unspool.errors import UnsupportedError


def test_what_was_tried_can_be_taken_back(cache: Cache) -> None:
    """Also what a ring wrote over, and more than it has places for."""
    plain = Plain(cache, [[], []])
    plain.read(9, [9, 3])
    for tried, kept in (([1, 1], [0, 1]), ([4, 2], [1, 0]), ([20, 20], [3, 17]), ([2, 0], [2, 0])):
        before = list(cache.lengths)
        cache.begin_trial()
        if tried == [2, 0]:
            plain.read(1, [1, 0])
            plain.read(1, [1, 0])
        else:
            plain.read(max(tried), tried)
        plain.truncate([held + n for held, n in zip(before, kept, strict=True)])
        plain.read(1)
    plain.truncate([0, cache.lengths[1]])  # to the beginning, always
    plain.read(3)
    plain.read(1)


def test_rows_move_amid_a_trial(cache: Cache) -> None:
    plain = Plain(cache, [[], []])
    plain.read(9, [9, 7])
    cache.begin_trial()
    plain.read(3)
    plain.select([1, 0, 1])
    plain.truncate([7, 10, 9])
    plain.read(2)


def test_a_ring_says_what_it_can_not_take_back() -> None:
    for kind in ("sliding", "hybrid", "sink"):
        plain = Plain(KINDS[kind](), [[]])
        plain.read(20)
        plain.truncate([19])  # one position is free: what it wrote over, no query sees again
        plain.read(2)
        with pytest.raises(UnsupportedError, match="can't roll back from 21 positions to 15"):
            plain.cache.truncate([15])
        assert plain.cache.lengths == [21]
        plain.read(1)


@pytest.mark.parametrize("kind", ["quantized hybrid", "quantized sliding", "offloaded quantized hybrid"])
def test_packed_windows_let_go_and_say_so(kind: str) -> None:
    plain = Plain(KINDS[kind](), [[], [], []])
    cache = plain.cache
    assert isinstance(cache, QuantizedHybridCache)
    plain.read(12, [12, 3, 9])
    size = cache.nbytes
    for turn in range(110):  # past the room of a window, so that it slides row by row
        plain.read(1)
        if turn % 9 == 0:
            plain.attempt(7, [turn % 8, 0, 3])
        if turn == 50:
            plain.select([2, 0, 0, 1])
            plain.attempt(2, [1, 2, 0, 1])
            plain.select([1, 3, 0])
    bases = cache._store.layers[0].bases
    assert all(base > 0 for base in bases) and len(set(bases)) > 1
    assert cache._store.layers[1].bases == (bases if cache.kinds[1] == "sliding" else [0, 0, 0])
    plain.truncate([length - 1 for length in cache.lengths])  # one position is free
    plain.read(1)
    before = list(cache.lengths)
    with pytest.raises(UnsupportedError, match=f"row 0 can't roll back to {bases[0] + 2} positions: a window of 6"):
        cache.truncate([bases[0] + 2, *before[1:]])
    assert cache.lengths == before and cache.nbytes == size
    plain.read(40, [40, 1, 0])  # a pass that the window is too small for
    plain.truncate([0, cache.lengths[1], cache.lengths[2]])
    plain.read(3)
    plain.read(1)
