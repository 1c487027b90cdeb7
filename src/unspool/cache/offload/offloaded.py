"""Caches whose keys live where memory is cheap: beside the GPU, or in a file where there is none."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch

from unspool.cache.base import BRANCH, DIVIDE, FLAT, FORK
from unspool.cache.buffered import BufferedCache
from unspool.cache.dynamic import DynamicCache
from unspool.cache.files import saved
from unspool.cache.offload.ferry import Ferry
from unspool.cache.offload.mapped import take_mapped
from unspool.cache.places import Landing, Places
from unspool.cache.span import Span
from unspool.cache.static import StaticCache
from unspool.cache.stores.layout import split
from unspool.errors import SettingError

HOST = torch.device("cpu")


class OffloadingCache(BufferedCache):
    """What offloaded caches share: homes that are pinned (beside a GPU) or mapped files (on a CPU)."""

    lives_elsewhere = True
    _folder: str | Path | None  # of mapped files
    _num_resident: int  # layers that stay on the GPU
    _num_layers: int
    _device: torch.device  # where the model computes
    _ferry: Ferry | None

    def _prepare(self, device: torch.device, folder: str | Path | None, resident_layers: int, num_layers: int) -> None:
        """Settle where keys go; before any memory is taken."""
        if resident_layers < 0:
            raise SettingError(
                f"`resident_layers` counts layers that stay on the device; it can't be {resident_layers}"
            )
        self._folder, self._num_resident, self._num_layers = folder, resident_layers, num_layers
        self._device, self._ferry = torch.device("cpu"), None
        self._move_to(device)

    def _move_to(self, device: torch.device) -> None:
        if device.type not in ("cpu", "cuda"):
            raise SettingError(f"keys on {device} can't be offloaded; use a CPU or a CUDA device, or a DynamicCache")
        self._device, self._ferry = device, Ferry(device) if device.type == "cuda" else None

    def _take(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if self._device.type == "cpu":
            return take_mapped(shape, dtype, self._folder)
        if device.type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=device)  # a layer that stays
        return torch.zeros(shape, dtype=dtype, pin_memory=True)

    def _stays(self, layer: int) -> bool:
        """Whether a layer lives on the GPU for good.

        Those that don't are spread, each after some that do: what computes there hides the copy.
        """
        num_layers = max(self._num_layers, 1)
        num_away = max(num_layers - self._num_resident, 0)
        return (layer + 1) * num_away // num_layers == layer * num_away // num_layers

    def begin(
        self,
        rows: int,
        num_new: int,
        counts: Sequence[int] | None = None,
        device: torch.device | str = "cpu",
    ) -> Span:
        self._follow(torch.device(device))
        return super().begin(rows, num_new, counts, device)

    def _follow(self, device: torch.device) -> None:
        if not self._buffers and device.type != self._device.type:
            self._move_to(device)

    def write(self, layer: int, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self._ferry is None:
            return super().write(layer, kv)
        if layer >= len(self._buffers):
            self._add_layer(layer, kv.shape[0], kv.shape[3], kv.shape[4], kv.dtype, kv.device)
        if self._buffers[layer].device.type != "cpu":
            self._fetch_after(layer)
            return super().write(layer, kv)
        span, rows = self._require_span(), kv.shape[0]
        home = self._buffers[layer]
        landed = self._ferry.bring(layer, home, max(span.starts), rows)
        buffer = landed.narrow(0, 0, rows)
        if span.is_uniform:
            buffer.narrow(1, span.starts[0], span.num_new).copy_(kv)
        else:
            buffer.index_put_((torch.arange(rows, device=kv.device)[:, None], span.positions), kv)
        self._ferry.send_home(home, landed, span)
        self._fetch_after(layer)
        return split(buffer.narrow(1, 0, span.stop))

    def _add_layer(
        self, layer: int, rows: int, heads: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._num_layers = max(self._num_layers, layer + 1)
        home = device if self._device.type != "cpu" and self._stays(layer) else torch.device("cpu")
        super()._add_layer(layer, rows, heads, width, dtype, home)

    def _fetch_after(self, layer: int) -> None:
        """Start the copy of the next layer that lives elsewhere; after the last, the first of the next pass."""
        span, num_layers = self._require_span(), len(self._buffers)
        assert self._ferry is not None
        if self._ferry.is_under_way:
            return
        for following in range(layer + 1, layer + num_layers):
            index = following % num_layers
            if self._buffers[index].device.type == "cpu":
                is_next_pass = following >= num_layers
                if is_next_pass and layer + 1 < self._num_layers:
                    return  # the layers of this pass are not all there yet
                held = span.stop if is_next_pass else max(span.starts)
                if held:
                    self._ferry.fetch_ahead(index, self._buffers[index], held, len(span.starts))
                return

    def places(self, *, in_order: bool = False) -> Places | None:  # noqa: ARG002 - they always are
        """Beside a GPU captured steps find keys by their address there, and bring them over by themselves; mapped files
        are memory like any other."""
        if self._ferry is not None and not self._ferry.is_idle:
            self._settle()
        return self._find_places()

    def _make_places(self) -> Places:
        away = tuple(layer for layer, buffer in enumerate(self._buffers) if buffer.device.type == "cpu")
        landing = None
        if away and self._ferry is not None:
            homes = [self._buffers[layer] for layer in away]
            first, second = self._ferry.show_landings(homes[0])
            landing = Landing(away, [(home,) for home in homes], ((first,), (second,)))
        return Places(list(self._buffers), is_pinned=self._ferry is not None, landing=landing)

    # --- the host reads or moves what the ferry may still carry -----------------------------------------
    def _settle(self) -> None:
        if self._ferry is not None:
            self._ferry.finish()

    def _select(self, index: torch.Tensor) -> None:
        self._settle()
        super()._select(index)

    def copy_rows(self, index: Sequence[int], first: int) -> None:
        self._settle()
        super().copy_rows(index, first)

    def _append(self, layer: int, span: Span, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self._follow(kv.device)
        self._settle()
        keys, values = super()._append(layer, span, kv)
        return keys.to(kv.device), values.to(kv.device)

    def _show(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        self._settle()
        return super()._show(layer)

    def _join(self, other: BufferedCache) -> None:
        self._settle()
        if isinstance(other, OffloadingCache):
            other._settle()
        super()._join(other)

    def clone(self) -> Self:
        self._settle()
        ferry, self._ferry = self._ferry, None  # streams are not copied
        try:
            copied = super().clone()
        finally:
            self._ferry = ferry
        copied._buffers = []
        for buffer in self._buffers:
            copied._buffers.append(copied._take(tuple(buffer.shape), buffer.dtype, buffer.device).copy_(buffer))
        copied._move_to(self._device)
        return copied

    def _shared(self) -> list[Any]:
        return list(self._buffers)  # they get memory of their own kind

    def _pack(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        self._settle()
        return super()._pack()

    def prefetch_layer(self, layer_idx: int) -> None:
        """Start bringing a layer to the GPU; without one there is nothing to do."""
        if self._ferry is not None and layer_idx < len(self._buffers) and self.lengths:
            self._settle()
            self._ferry.fetch_ahead(layer_idx, self._buffers[layer_idx], max(self.lengths), len(self.lengths))

    def evict_previous_layer(self, layer_idx: int) -> None:
        """Nothing to do: a layer goes home with the pass that wrote it."""

    @property
    def device_bytes(self) -> int:
        """Bytes of GPU memory in use."""
        staying = sum(buffer.nbytes for buffer in self._buffers if buffer.device.type != "cpu")
        return staying + (self._ferry.nbytes if self._ferry is not None else 0)


@saved
class OffloadedCache(OffloadingCache, DynamicCache):
    """A dynamic cache whose keys live in pinned host memory, or in a temporary file on a machine without a GPU."""

    can = DynamicCache.can - {FORK, DIVIDE, FLAT, BRANCH}  # keys that are on their way belong to all rows

    def __init__(
        self,
        *,
        capacity: int | None = None,
        folder: str | Path | None = None,
        resident_layers: int = 0,
        num_layers: int = 0,
    ) -> None:
        self._prepare(torch.device("cpu"), folder, resident_layers, num_layers)
        DynamicCache.__init__(self, capacity=capacity)

    def _make_room(self, stop: int) -> None:
        self._settle()
        super()._make_room(stop)

    def new_like(self, room: int) -> Self:
        like = type(self)(
            capacity=room, folder=self._folder, resident_layers=self._num_resident, num_layers=self._num_layers
        )
        like._move_to(self._device)
        return like

    def take_rows(self, index: Sequence[int]) -> Self:
        self._settle()
        return super().take_rows(index)


@saved
class OffloadedStaticCache(OffloadingCache, StaticCache):
    """A static cache whose keys live in host memory: fixed room, on the device only two layers at a time."""

    can = StaticCache.can - {FORK, DIVIDE, FLAT}

    def __init__(
        self,
        config: Any,
        max_batch_size: int,
        max_cache_len: int | None,
        device: str | torch.device,
        dtype: torch.dtype | None = None,
        offload_device: str | torch.device = HOST,
        layer_device_map: dict[int, str | torch.device | int] | None = None,
        *,
        folder: str | Path | None = None,
        resident_layers: int = 0,
    ) -> None:
        if torch.device(offload_device).type != "cpu":
            raise SettingError(f"keys are offloaded to the CPU's memory, not to {offload_device}")
        self.offload_device = torch.device(offload_device)
        self._prepare(torch.device(device), folder, resident_layers, int(config.num_hidden_layers))
        dtype = dtype or torch.float32
        StaticCache.__init__(self, config, max_batch_size, max_cache_len, device, dtype, layer_device_map)

    def reset(self) -> None:
        self._settle()
        super().reset()
