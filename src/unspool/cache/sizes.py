"""The sizes of a model's keys: as its config says them, and whether a cache's fit them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from unspool.cache.stores.memory import KeyFormat
from unspool.cache.stores.store import Store

DeviceMap = dict[int, str | torch.device | int]


@dataclass(frozen=True, slots=True)
class KeySizes:
    """The keys and values of one position in all layers."""

    heads: int
    width: int
    dtype: torch.dtype
    devices: tuple[torch.device, ...]  # one per layer

    @property
    def position_bytes(self) -> int:
        """Bytes of one position in all layers."""
        return len(self.devices) * 2 * self.heads * self.width * self.dtype.itemsize

    def open(self, store: Store, rows: int) -> None:
        """Take the memory of all layers."""
        for layer, device in enumerate(self.devices):
            store.add_layer(layer, rows, KeyFormat(self.heads, self.width, self.dtype, device))

    def as_config(self, **more: Any) -> SimpleNamespace:
        """The same under the names that model configs use."""
        return SimpleNamespace(
            num_hidden_layers=len(self.devices), num_attention_heads=self.heads, head_dim=self.width, **more
        )


def read_sizes(
    config: Any, device: torch.device | str | None, dtype: torch.dtype, layer_device_map: DeviceMap | None = None
) -> KeySizes:
    """The sizes of a model's keys, where each layer's lie on its device."""
    heads = int(config.num_attention_heads)
    places = [(layer_device_map or {}).get(layer, device) for layer in range(int(config.num_hidden_layers))]
    return KeySizes(
        int(getattr(config, "num_key_value_heads", None) or heads),
        int(getattr(config, "head_dim", None) or config.hidden_size // heads),
        dtype,
        tuple(torch.device(place if place is not None else "cpu") for place in places),
    )


def unpack_sizes(facts: dict[str, Any], tensors: dict[str, torch.Tensor]) -> KeySizes:
    """The sizes that a file says of its layers; a ValueError for those that can't be."""
    like, heads, width = tensors["layer.0"], int(facts["heads"]), int(facts["width"])
    if heads < 1 or width < 1:
        raise ValueError(f"{heads} heads of width {width} can't be")
    return KeySizes(heads, width, like.dtype, (like.device,) * len(tensors))


def read_kinds(config: Any) -> list[str]:
    """ "full" or "sliding", one per layer, as a model's config says."""
    num_layers = int(config.num_hidden_layers)
    listed = getattr(config, "layer_types", None)
    if listed:
        return ["sliding" if "sliding" in str(kind) else "full" for kind in listed]
    if read_window(config) is None:
        return ["full"] * num_layers
    # What Gemma's configs say if they do not list the layers: every second one, or all but every n-th, slides.
    pattern = int(getattr(config, "sliding_window_pattern", None) or 2)
    return ["full" if (layer + 1) % pattern == 0 else "sliding" for layer in range(num_layers)]


def read_window(config: Any) -> int | None:
    """The keys that a sliding layer sees, or None if there is no window."""
    window = getattr(config, "sliding_window", None)
    return None if window is None else int(window)


def find_layer_misfit(kinds: tuple[str, ...], window: int | None, shape: Any) -> str | None:
    """Why layers of these kinds are not a model's; None if they may be."""
    wanted = tuple(shape.layer_kinds) or ("full",) * shape.num_layers
    if len(wanted) == len(kinds) and wanted != kinds:
        layer = next(layer for layer, kind in enumerate(wanted) if kind != kinds[layer])
        return f"its layer {layer} is {kinds[layer]} and the model's {wanted[layer]}"
    if "sliding" in kinds and shape.window != window:
        return f"its window is {window} and the model's {shape.window}"
    return None


def find_tensor_misfit(tensors: Sequence[torch.Tensor], shape: Any, *, lives_elsewhere: bool) -> str | None:
    """Why keys of a shape (`KeyShape`) can't be written to one tensor per layer (…, heads, width); None if they can."""
    for layer, held in enumerate(tensors):
        if held.device.type != shape.device.type and not lives_elsewhere:
            return f"its keys are on {held.device} and the model on {shape.device}"
        if held.dtype != shape.dtype:
            return f"its keys are {held.dtype} and the model's {shape.dtype}"
        if tuple(held.shape[-2:]) != (shape.num_kv_heads, shape.head_dim):
            found = f"{held.shape[-2]} heads of width {held.shape[-1]}"
            return f"layer {layer} has {found} and the model {shape.num_kv_heads} of width {shape.head_dim}"
    if tensors and len(tensors) != shape.num_layers:
        return f"it has {len(tensors)} layers and the model {shape.num_layers}"
    return None
