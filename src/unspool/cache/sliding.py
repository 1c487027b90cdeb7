"""Caches for models with windows: a ring for every layer that slides, and every key for those that don't."""

from __future__ import annotations

from typing import Any

import torch

from unspool.cache.files import saved
from unspool.cache.layered import LayeredCache, Room
from unspool.cache.stores.plain import Allocate, take_memory
from unspool.errors import SettingError

DeviceMap = dict[int, str | torch.device | int]


@saved
class SlidingWindowCache(LayeredCache):
    """A cache for models all of whose layers slide (Mistral): memory is bounded by the window, texts are not."""

    def __init__(
        self,
        config: Any,
        max_batch_size: int,
        max_cache_len: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
        layer_device_map: DeviceMap | None = None,
    ) -> None:
        kinds = ["sliding"] * int(config.num_hidden_layers)
        window = read_window(config)
        if window is None:
            raise SettingError(
                "a SlidingWindowCache needs a window, and the config has no sliding_window; use a DynamicCache"
            )
        room = read_room(config, max_batch_size, max_cache_len or window, device, dtype, layer_device_map)
        super().__init__(kinds, window, room)


@saved
class HybridCache(LayeredCache):
    """A cache for models some of whose layers slide (Gemma 2 and 3): rings beside buffers of every key."""

    def __init__(
        self,
        config: Any,
        max_batch_size: int,
        max_cache_len: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
        layer_device_map: DeviceMap | None = None,
        *,
        allocate: Allocate = take_memory,
    ) -> None:
        kinds, window = read_kinds(config), read_window(config)
        longest = max_cache_len or int(config.max_position_embeddings)
        if window is None:
            if "sliding" in kinds:
                raise SettingError("the config names sliding layers and no sliding_window")
            window = longest
        room = read_room(config, max_batch_size, longest, device, dtype, layer_device_map)
        super().__init__(kinds, window, room, allocate)


def read_kinds(config: Any) -> list[str]:
    """ "full" or "sliding", a layer each, as a model's config tells it."""
    num_layers = int(config.num_hidden_layers)
    listed = getattr(config, "layer_types", None)
    if listed:
        return ["sliding" if "sliding" in str(kind) else "full" for kind in listed]
    if read_window(config) is None:
        return ["full"] * num_layers
    # What Gemma's configs say where they do not list the layers: every second one, or all but every n-th, slides.
    pattern = int(getattr(config, "sliding_window_pattern", None) or 2)
    return ["full" if (layer + 1) % pattern == 0 else "sliding" for layer in range(num_layers)]


def read_window(config: Any) -> int | None:
    """The keys that a sliding layer sees, or None where there is no window."""
    window = getattr(config, "sliding_window", None)
    return None if window is None else int(window)


def read_room(
    config: Any,
    rows: int,
    positions: int,
    device: torch.device | str | None,
    dtype: torch.dtype,
    layer_device_map: DeviceMap | None,
) -> Room:
    """What to take memory for, checked."""
    if rows < 1 or positions < 1:
        raise SettingError(f"a cache needs at least one row and one position, not {rows} and {positions}")
    heads = int(config.num_attention_heads)
    width = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    places = [(layer_device_map or {}).get(layer, device) for layer in range(int(config.num_hidden_layers))]
    return Room(
        rows,
        positions,
        int(getattr(config, "num_key_value_heads", None) or heads),
        width,
        dtype,
        tuple(torch.device(place if place is not None else "cpu") for place in places),
    )


def refuse_without_window(info: Any) -> str | None:
    """Why a model can't decode with rings alone, or None where it can."""
    if getattr(info, "is_encoder_decoder", False) or not info.window or "sliding" not in info.layer_kinds:
        return f"a {info.family} model has no sliding window; use 'dynamic' or 'static'"
    if "full" in info.layer_kinds:
        return f"some layers of this {info.family} model see the whole text; use 'hybrid'"
    return None


def refuse_encoder_decoder(info: Any) -> str | None:
    """Why a kind for decoders can't serve a model, or None where it can."""
    return f"a {info.family} model has an encoder; use 'dynamic' or 'static'" if info.is_encoder_decoder else None
