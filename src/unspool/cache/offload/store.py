"""Whole rows that live where memory is cheap: pinned beside a GPU, or in files if there is none."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch

from unspool.cache.offload.ferry import Ferry
from unspool.cache.offload.memory import take_mapped
from unspool.cache.places import Landing, Places
from unspool.cache.span import Span
from unspool.cache.stores.memory import KeyFormat, Room, split
from unspool.cache.stores.plain import PlainStore, put
from unspool.errors import SettingError

HOST = torch.device("cpu")


class AwayStore(PlainStore):
    """Buffers that are homes: a ferry brings a layer to the GPU before it is read, and new keys back."""

    def __init__(self, room: Room, folder: str | Path | None, num_resident: int, num_layers: int) -> None:
        if num_resident < 0:
            raise SettingError(f"`resident_layers` counts layers that stay on the device; it can't be {num_resident}")
        super().__init__(room)
        self._folder, self._num_resident, self._expected = folder, num_resident, num_layers
        self.device = HOST  # where the model computes
        self.ferry: Ferry | None = None  # what carries keys there

    def move_to(self, device: torch.device) -> None:
        """Let the model compute on a device; before any memory is taken."""
        if device.type not in ("cpu", "cuda"):
            raise SettingError(f"keys on {device} can't be offloaded; use a CPU or a CUDA device, or a DynamicCache")
        self.device, self.ferry = device, Ferry(device) if device.type == "cuda" else None

    def _take(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if self.device.type == "cpu":
            return take_mapped(shape, dtype, self._folder)
        if device.type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=device)  # a layer that stays
        return torch.zeros(shape, dtype=dtype, pin_memory=True)

    def _stays(self, layer: int) -> bool:
        """Whether a layer lives on the GPU for good.

        Those that don't are spread, each after some that do: what computes there hides the copy.
        """
        num_layers = max(self._expected, 1)
        num_away = max(num_layers - self._num_resident, 0)
        return (layer + 1) * num_away // num_layers == layer * num_away // num_layers

    def _follow(self, device: torch.device) -> None:
        """Let the model compute where its keys come from, until memory is taken."""
        if not self.buffers and device.type != self.device.type:
            self.move_to(device)

    def add_layer(self, layer: int, rows: int, keys: KeyFormat) -> None:
        self._follow(keys.device)
        self._expected = max(self._expected, layer + 1)
        stays = self.device.type != "cpu" and self._stays(layer)
        super().add_layer(layer, rows, keys if stays else keys._replace(device=HOST))

    # --- a pass --------------------------------------------------------------------------------------
    def begin(self, span: Span) -> None:
        self._follow(torch.device(span.device))

    def write(self, layer: int, span: Span, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.ferry is None:
            return super().write(layer, span, kv)
        rows = kv.shape[0]
        self._ensure_layer(layer, rows, kv)
        home = self.buffers[layer]
        if home.device.type != "cpu":
            self._fetch_after(layer, span)
            return super().write(layer, span, kv)
        landed = self.ferry.bring(layer, home, max(span.starts), rows)
        seen = put(landed.narrow(0, 0, rows), span, kv)
        self.ferry.send_home(home, landed, span)
        self._fetch_after(layer, span)
        return split(seen)

    def write_home(self, layer: int, span: Span, kv: torch.Tensor) -> None:
        """Store a pass in a layer's home itself."""
        self.settle()
        super().write(layer, span, kv)

    def _fetch_after(self, layer: int, span: Span) -> None:
        """Start the copy of the next layer that lives elsewhere; after the last, the first of the next pass."""
        num_layers = len(self.buffers)
        assert self.ferry is not None
        if self.ferry.is_under_way:
            return
        for following in range(layer + 1, layer + num_layers):
            index = following % num_layers
            if self.buffers[index].device.type == "cpu":
                is_next_pass = following >= num_layers
                if is_next_pass and layer + 1 < self._expected:
                    return  # the layers of this pass are not all there yet
                held = span.stop if is_next_pass else max(span.starts)
                if held:
                    self.ferry.fetch_ahead(index, self.buffers[index], held, len(span.starts))
                return

    def places(self) -> Places | None:
        """Beside a GPU captured steps find keys by their address there, and bring them over by themselves; mapped files
        are memory like any other."""
        if self.ferry is not None and not self.ferry.is_idle:
            self.settle()
        return super().places()

    def _make_places(self) -> Places:
        away = tuple(layer for layer, buffer in enumerate(self.buffers) if buffer.device.type == "cpu")
        landing = None
        if away and self.ferry is not None:
            homes = [self.buffers[layer] for layer in away]
            first, second = self.ferry.show_landings(homes[0])
            landing = Landing(away, [(home,) for home in homes], ((first,), (second,)))
        return Places(list(self.buffers), is_pinned=self.ferry is not None, landing=landing)

    # --- the host reads or moves what the ferry may still carry -----------------------------------------
    def settle(self) -> None:
        """Have everything at home."""
        if self.ferry is not None:
            self.ferry.finish()

    def grow(self, stop: int) -> None:
        self.settle()
        super().grow(stop)

    def select(self, index: Sequence[int], lengths: Sequence[int]) -> None:
        self.settle()
        super().select(index, lengths)

    def copy_rows(self, index: Sequence[int], first: int, held: int) -> None:
        self.settle()
        super().copy_rows(index, first, held)

    def join(self, other: Any, mine: Sequence[int], theirs: Sequence[int]) -> None:
        self.settle()
        other.settle()
        super().join(other, mine, theirs)

    def take_rows(self, index: Sequence[int]) -> Self:
        self.settle()
        return super().take_rows(index)

    def clone(self) -> Self:
        self.settle()
        return super().clone()

    def _like(self) -> Self:
        room = Room(self.room.positions, self.room.rows)
        made = type(self)(room, self._folder, self._num_resident, self._expected)
        made.move_to(self.device)
        return made

    def read(self, layer: int, rows: int, length: int) -> torch.Tensor:
        self.settle()
        return super().read(layer, rows, length)

    def pack(self, rows: int, length: int) -> list[torch.Tensor]:
        self.settle()
        return super().pack(rows, length)

    def clear(self) -> None:
        self.settle()
        super().clear()
