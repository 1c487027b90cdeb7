"""Forks over one copy of a row see what copies of the row would, and the one that is kept is there afterwards."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unspool.cache import FORK, Cache, DynamicCache, EncoderDecoderCache, StaticCache
from unspool.errors import SettingError, UnsupportedError

LAYERS, HEADS, WIDTH = 2, 2, 3
SIZES = SimpleNamespace(num_attention_heads=HEADS, hidden_size=HEADS * WIDTH, num_hidden_layers=LAYERS)
KINDS = {
    "dynamic": DynamicCache,
    "static": lambda: StaticCache(SIZES, 4, 300),
    "pair": lambda: EncoderDecoderCache(DynamicCache(), DynamicCache()),
}


def read(cache: Cache, kv: torch.Tensor, counts: list[int] | None = None) -> None:
    """One pass that writes `kv` (rows, new, 2, heads, width), a little different in every layer."""
    cache.begin(*kv.shape[:2], counts)
    for layer in range(LAYERS):
        cache.write(layer, kv + layer)
    cache.end()


def look(view: Cache, kv: torch.Tensor, window: int | None) -> list[list[torch.Tensor]]:
    """What each fork sees of keys and values in each layer of a pass, in the order of the keys' positions."""
    span = view.begin(kv.shape[0], 1)
    visible, positions = view.mask(span, window), view.key_positions(span)
    assert isinstance(visible, torch.Tensor)
    visible = visible[:, 0, 0].repeat(kv.shape[0] // visible.shape[0], 1)  # (rows * forks, keys)
    positions = positions.expand(kv.shape[0], -1)
    seen = []
    for layer in range(LAYERS):
        keys, values = view.write(layer, kv + layer)
        rows = [row for row in range(keys.shape[0]) for _ in range(view.num_forks)]
        both = [torch.stack((keys[row], values[row]))[:, :, visible[fork]] for fork, row in enumerate(rows)]
        for fork in range(len(rows)):
            there = positions[fork, visible[fork]].tolist()
            assert there == list(range(span.starts[fork] + 1))[-len(there) :]
        seen.append(both)
    view.end()
    return seen


@settings(max_examples=30)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    num=st.integers(1, 4),
    one_by_one=st.booleans(),
    window=st.sampled_from([None, 1, 3]),
    seed=st.integers(0, 1000),
)
def test_forks_see_what_copies_would(
    kind: str, lengths: list[int], num: int, one_by_one: bool, window: int | None, seed: int
) -> None:
    torch.manual_seed(seed)
    cache, plain = KINDS[kind](), DynamicCache()
    rows = len(lengths)
    prompt = torch.randn(rows, max(lengths), 2, HEADS, WIDTH)
    for each in (cache, plain):
        read(each, prompt, lengths)
    for _ in range(3):
        forks = torch.randn(rows, num, 2, HEADS, WIDTH)
        parts = [range(j, j + 1) for j in range(num)] if one_by_one else [range(num)]
        for part in parts:
            new = forks[:, part.start : part.stop].reshape(-1, 1, 2, HEADS, WIDTH)
            seen = look(cache.fork(part), new, window)
            for layer in range(LAYERS):
                for place, found in enumerate(seen[layer]):
                    row, length = place // len(part), plain.lengths[place // len(part)]
                    past = torch.stack(plain[layer])[:, row, :, :length]  # (2, heads, length, width)
                    own = (new[place, 0] + layer)[:, :, None]
                    whole = torch.cat((past, own), dim=2)
                    assert torch.equal(found, whole if window is None else whole[:, :, -window:])
        assert cache.lengths == plain.lengths  # nothing is held yet
        chosen = torch.randint(num, (rows,))
        cache.keep_fork(chosen)
        read(plain, forks[torch.arange(rows), chosen][:, None])
        assert cache.lengths == plain.lengths
        own = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
        for layer in range(LAYERS):
            for mine, theirs in zip(own[layer], plain[layer], strict=True):
                for row, length in enumerate(plain.lengths):
                    assert torch.equal(mine[row, :, :length], theirs[row, :, :length])


def test_rows_that_leave_after_a_fork() -> None:
    cache, plain = DynamicCache(), DynamicCache()
    for each in (cache, plain):
        read(each, torch.arange(2 * 3 * 2 * HEADS * WIDTH).view(2, 3, 2, HEADS, WIDTH).float(), [3, 2])
    new = torch.randn(2, 2, 2, HEADS, WIDTH)
    look(cache.fork(range(2)), new.view(4, 1, 2, HEADS, WIDTH), None)
    cache.keep_fork(torch.tensor([1, 0]))
    read(plain, torch.stack((new[0, 1], new[1, 0]))[:, None])
    for each in (cache, plain):
        each.select_rows([1])
    assert cache.lengths == plain.lengths == [3]
    assert all(torch.equal(mine[:, :, :3], theirs[:, :, :3]) for mine, theirs in zip(cache[1], plain[1], strict=True))


def test_weights_in_the_order_of_positions() -> None:
    cache = DynamicCache()
    read(cache, torch.zeros(2, 3, 2, HEADS, WIDTH), [3, 1])
    weights = torch.arange(5.0).expand(4, 1, 1, 5)  # two forks a row: columns 0 to 2 and 3, 4; 0 and 1, 2
    ordered = cache.fork(range(2)).order_weights(weights)[:, 0, 0].tolist()
    assert ordered == [[0, 1, 2, 3], [0, 1, 2, 4], [0, 1, 0, 0], [0, 2, 0, 0]]
    assert cache.order_weights(weights) is weights


def test_growing_for_forks() -> None:
    cache = DynamicCache(capacity=256)
    read(cache, torch.zeros(1, 255, 2, HEADS, WIDTH))
    look(cache.fork(range(4)), torch.ones(4, 1, 2, HEADS, WIDTH), None)
    cache.keep_fork(torch.tensor([3]))
    assert cache.lengths == [256] and float(cache[0][0][0, 0, -1, 0]) == 1.0


def test_what_cant_be() -> None:
    cache = StaticCache(SIZES, 4, 8)
    read(cache, torch.zeros(2, 6, 2, HEADS, WIDTH))
    with pytest.raises(SettingError, match="position 9 does not fit a StaticCache of 8"):
        cache.fork(range(3)).begin(6, 1)
    with pytest.raises(SettingError, match="a fork is one token, and 2 were given"):
        cache.fork(range(2)).begin(4, 2)
    with pytest.raises(SettingError, match="holds 4 rows and the forward pass has 2"):
        cache.fork(range(2)).begin(2, 1)
    with pytest.raises(UnsupportedError, match="a fork's rows don't move"):
        cache.fork(range(2)).select_rows([0])

    class Unshared(DynamicCache):
        can = DynamicCache.can - {FORK}

    for ask in (lambda: Unshared().fork(range(2)), lambda: Unshared().keep_fork(torch.tensor([0]))):
        with pytest.raises(UnsupportedError, match="Unshared can't fork rows"):
            ask()
