"""Rows that leave: the others stay in the memory that they have, as long as half of it is in use."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unspool.cache.stores.memory import KeyFormat, Room
from unspool.cache.stores.plain import PlainStore

HEADS, WIDTH = 2, 3


def make(rows: int, layers: int = 2) -> tuple[PlainStore, list[torch.Tensor]]:
    store = PlainStore(Room(8))
    for layer in range(layers):
        store.add_layer(layer, rows, KeyFormat(HEADS, WIDTH, torch.float32, torch.device("cpu")))
        store.buffers[layer].copy_(torch.randn(rows, 8, 2, HEADS, WIDTH))
    return store, [buffer.clone() for buffer in store.buffers]


@settings(max_examples=80)
@given(st.data())
def test_rows_that_stay_keep_their_keys(data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 9))
    store, expected = make(rows)
    for _ in range(data.draw(st.integers(1, 4))):
        lengths = [data.draw(st.integers(1, 8)) for _ in range(rows)]
        index = sorted(data.draw(st.sets(st.integers(0, rows - 1), min_size=1)))
        if data.draw(st.booleans()):
            index = data.draw(st.permutations(index))
        store.select(index, lengths)
        rows, held = len(index), max(lengths)
        for layer, old in enumerate(expected):
            assert store.buffers[layer].shape == (rows, 8, 2, HEADS, WIDTH)
            expected[layer] = store.buffers[layer].clone()
            assert torch.equal(store.buffers[layer][:, :held], old[index, :held])


def test_memory_is_given_back_once_half_of_it_is_empty() -> None:
    store, _ = make(8)
    first = store.buffers[0].data_ptr()
    store.select([0, 2, 3, 5, 7], [8] * 8)
    assert store.buffers[0].data_ptr() == first and store.buffers[0].is_contiguous()
    store.select([0, 1, 3, 4], [8] * 5)
    assert store.buffers[0].data_ptr() != first
    assert store.buffers[0].untyped_storage().nbytes() == store.buffers[0].nbytes
