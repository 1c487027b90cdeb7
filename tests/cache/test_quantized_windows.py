"""Packed windows: they hold what whole layers hold, and little else."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.cache.small_packing import HEADS, LAYERS, SIZES, WIDTH, configure

from unspool.cache import HybridCache, QuantizedCache, QuantizedCacheConfig, QuantizedHybridCache
from unspool.kernels.packed_keys import PackedKeys

WINDOW = 10
SLIDING = SimpleNamespace(
    **vars(SIZES),
    sliding_window=WINDOW,
    layer_types=["sliding_attention", "full_attention"],
)


@pytest.mark.parametrize("residual_length", [0, 2 * WINDOW])
@settings(max_examples=6)
@given(data=st.data())
def test_windows_hold_what_whole_layers_hold(residual_length: int, data: st.DataObject) -> None:
    """Whatever slid away, a query sees the numbers that it would see in a cache that lets nothing go, bit by bit."""
    config = configure(nbits=4, residual_length=residual_length)
    whole, near = QuantizedCache(config), QuantizedHybridCache(config, SLIDING, 4, 400)
    rng = torch.Generator().manual_seed(1)
    rows = data.draw(st.integers(1, 3))
    for _ in range(data.draw(st.integers(4, 14))):
        what = (
            data.draw(st.sampled_from(["read", "steps", "steps", "try", "back", "select"])) if near.lengths else "read"
        )
        if what == "select":
            index = data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=4))
            whole.select_rows(index), near.select_rows(index)
            rows = len(index)
        elif what == "back":  # one position is always free
            lengths = [max(0, length - data.draw(st.integers(0, 1))) for length in near.lengths]
            whole.truncate(lengths), near.truncate(lengths)
        else:
            before = list(near.lengths)
            num_new = data.draw(st.integers(1, {"read": 30, "steps": 1, "try": 9}[what]))
            if what == "try":
                whole.begin_trial(), near.begin_trial()
            for _ in range(12 if what == "steps" else 1):
                compare_pass(whole, near, torch.rand(rows, num_new, 2, HEADS, WIDTH, generator=rng), WINDOW)
            if what == "try":
                kept = [length + data.draw(st.integers(0, num_new)) for length in before]
                whole.truncate(kept), near.truncate(kept)
    assert near.lengths == whole.lengths


def compare_pass(whole: QuantizedCache, near: QuantizedHybridCache, new: torch.Tensor, window: int) -> None:
    """One pass over both; the sliding layer's visible keys and values are those of the whole one."""
    rows, num_new = new.shape[:2]
    span = near.begin(rows, num_new)
    whole.begin(rows, num_new)
    mask = near.mask(span, window)
    places = near.key_positions(span, window).expand(rows, -1)
    for layer in range(LAYERS):
        mine, theirs = near.write(layer, new.clone()), whole.write(layer, new.clone())
        for found, expected in zip(mine, theirs, strict=True):
            kept = places.shape[1] if layer == 0 else span.stop
            found = found.unpack(kept) if isinstance(found, PackedKeys) else found
            expected = expected.unpack(span.stop) if isinstance(expected, PackedKeys) else expected
            for row in range(rows):
                for query in range(num_new):
                    position = span.starts[row] + query
                    if layer == 1:
                        assert torch.equal(found[row, :, : position + 1], expected[row, :, : position + 1])
                        continue
                    visible = (places[row] <= position) & (places[row] > position - window)
                    if isinstance(mask, torch.Tensor):
                        assert torch.equal(mask.expand(rows, 1, num_new, kept)[row, 0, query], visible)
                    wanted = expected[row, :, max(0, position + 1 - window) : position + 1]
                    assert torch.equal(found[row][:, visible], wanted)
    near.end()
    whole.end()


def test_packed_windows_are_small() -> None:
    """Layers as Gemma 2's, at 8k: a third of what plain rings and layers take."""
    sizes = SimpleNamespace(
        num_attention_heads=1, head_dim=64, num_hidden_layers=2, sliding_window=4096, layer_types=SLIDING.layer_types
    )
    plain = HybridCache(sizes, 1, 8192, dtype=torch.bfloat16)
    packed = QuantizedHybridCache(QuantizedCacheConfig("unspool", axis_value=1), sizes, 1, 8192, dtype=torch.bfloat16)
    assert packed.nbytes < 0.35 * plain.nbytes
