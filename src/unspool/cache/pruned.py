"""Keys that are let go: each layer and head keeps its own, and later tokens stand as far from them as before.

Rotated keys are turned so that they stand right before what follows: distances, which are all that rotary attention
sees, stay what they were, while keys lie side by side as those of a short prompt do.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unspool.cache.dynamic import DynamicCache
from unspool.cache.sink import KeyRotation, turn_keys
from unspool.errors import UnsupportedError


def explain_unpruned(info: object, rotation: KeyRotation | None, num_layers: int) -> str | None:
    """Why keys of a model can't be let go, or None if they can."""
    family = getattr(info, "family", "this model")
    if any(kind != "full" for kind in getattr(info, "layer_kinds", ())):
        return (
            f"layers of {family} see a window or keep a state, which keys that are let go would change; use a model "
            "whose layers see every key, or the kind 'sliding_window' or 'hybrid'"
        )
    shift = torch.zeros(1)
    if rotation is None or not rotation.can_shift:
        return (
            f"it is not known how positions enter the keys of {family}, or they are learned one by one; use a model "
            "with rotary positions"
        )
    if all(rotation.find_turns(layer, shift) is None for layer in range(num_layers)):
        return (
            f"{family} adds distances to scores, which keys that are let go would change; use a model with rotary "
            "positions"
        )
    return None


def keep_keys(cache: DynamicCache, kept: Sequence[torch.Tensor], rotation: KeyRotation) -> DynamicCache:
    """A cache with the keys of one row that each layer and head keeps: `kept` has places (heads, count) per layer, in
    order, as many for all."""
    (held,), count = cache.lengths, kept[0].shape[1]
    made = DynamicCache(capacity=count)
    layers = []
    for layer, places in enumerate(kept):
        kv = cache.read_layer(layer)  # (1, held, 2, heads, width)
        index = places.t()[None, :, None, :, None].expand(1, count, 2, kv.shape[3], kv.shape[4])
        chosen = kv.gather(1, index)
        factors = rotation.find_turns(layer, torch.tensor([count - held], device=kv.device))
        if factors is not None:
            chosen[:, :, 0] = turn_keys(chosen[:, :, 0], factors)
        layers.append(chosen)
    made.take_over(layers, [count])
    return made


def check_dynamic(cache: object) -> DynamicCache:
    """The cache, if keys can be let go of it."""
    if type(cache) is not DynamicCache:
        raise UnsupportedError(
            f"keys of a {type(cache).__name__} can't be let go one by one: they are packed, lie in blocks of several "
            "rows, or are let go by another rule; read the prefix into a 'dynamic' cache"
        )
    return cache
