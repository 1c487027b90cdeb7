"""Steps over keys that live beside the GPU: brought layer by layer, they are what keys that stay are."""

from __future__ import annotations

import pytest
import torch
from tests.gpu.models import make_model

import unspool
from unspool.cache import Cache

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

NUM_LAYERS = 5


def step_beside(near: Cache, far: Cache, window: int | None) -> None:
    """Take steps of ragged rows over both: rows move, leave and roll back."""
    model = make_model(window, torch.bfloat16, NUM_LAYERS)
    tokens = torch.randint(3, 96, (3, 200), generator=torch.Generator().manual_seed(8)).cuda()
    for cache in (near, far):
        model.forward(tokens[:, :90], cache, counts=[90, 3, 57])
    for column in range(90, 200):
        made = []
        for cache in (near, far):
            if column == 120:
                cache.select_rows([2, 0, 1])
            if column == 150:
                cache.truncate([length - 5 for length in cache.lengths])
            if column == 170:
                cache.select_rows([1, 0])
            made.append(model.forward(tokens[: len(cache.lengths), column : column + 1], cache))
        assert [forward.path for forward in made] == ["captured"] * 2
        assert torch.equal(made[0].logits, made[1].logits)


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("resident", range(NUM_LAYERS))
def test_layers_are_brought(resident: int, window: int | None) -> None:
    near, far = unspool.DynamicCache(), unspool.OffloadedCache(resident_layers=resident, num_layers=NUM_LAYERS)
    step_beside(near, far, window)
    places = far.places()
    assert places is not None and places.landing is not None
    assert len(places.landing.away) == NUM_LAYERS - resident
    for mine, its in zip(near._buffers, far._buffers, strict=True):  # what is new went home
        for row, length in enumerate(near.lengths):
            assert torch.equal(mine[row, :length].cpu(), its[row, :length].cpu())


@pytest.mark.parametrize("nbits", [2, 4, 8])
def test_packed_blocks_are_brought(nbits: int) -> None:
    model = make_model(None, torch.bfloat16, NUM_LAYERS)
    told = {"nbits": nbits, "q_group_size": 16, "residual_length": 32}
    near, far = (
        model.new_cache(kind, 3, 300, config=told) for kind in ("quantized_static", "offloaded_quantized_hybrid")
    )
    step_beside(near, far, None)
    places = far.places()
    assert places is not None and places.landing is not None and len(places.landing.away) == NUM_LAYERS
    assert places.packed is not None and min(places.packed.num_packed) > 50
