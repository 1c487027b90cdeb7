"""Sinks behind the reference's `update(keys, values, layer, {"cos", "sin"})`, for models that rotate by halves."""

from __future__ import annotations

from typing import Any

import torch

from unspool.errors import UnsupportedError


class ShiftedLayers:
    """Keys and values of every layer, in which positions stay below the window: what is kept moves to the front."""

    def __init__(self, window_length: int, num_sinks: int) -> None:
        self._window = window_length
        self._num_sinks = num_sinks
        self.keys: list[torch.Tensor] = []  # (rows, heads, positions, width)
        self.values: list[torch.Tensor] = []
        self._lasts: list[int] = []  # the position of each layer's newest key
        self.num_seen = 0
        self.hides_rotation = False  # the caller is a release of transformers that passes no angles to caches
        self._cos: torch.Tensor | None = None  # (positions, width): the first ones that callers showed
        self._sin: torch.Tensor | None = None

    @property
    def num_layers(self) -> int:
        """Layers written."""
        return len(self.keys)

    @property
    def nbytes(self) -> int:
        """Bytes that keys and values take."""
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values))

    def count(self, layer: int) -> int:
        """Positions that a layer keeps."""
        return self.keys[layer].shape[-2] if layer < len(self.keys) else 0

    def reorder(self, index: torch.Tensor) -> None:
        """Let rows follow an index."""
        self.keys = [keys.index_select(0, index.to(keys.device)) for keys in self.keys]
        self.values = [values.index_select(0, index.to(values.device)) for values in self.values]

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, given: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append positions to a layer; those between the sinks and the last ones go."""
        if layer == 0:
            self.num_seen += keys.shape[-2]
            self._learn(given.get("cos"), given.get("sin"))
        if layer == len(self.keys):
            self.keys.append(keys)
            self.values.append(values)
            self._lasts.append(keys.shape[-2] - 1)
            return keys, values
        held_keys, held_values = self.keys[layer], self.values[layer]
        num_gone = max(0, held_keys.shape[-2] + keys.shape[-2] - self._window)
        num_gone = min(num_gone, held_keys.shape[-2] - self._num_sinks)
        # The caller put the first new key at the position that `count` returned: the newest must stand before it.
        num_ahead = self._lasts[layer] + 1 - held_keys.shape[-2]
        self._lasts[layer] = held_keys.shape[-2] + keys.shape[-2] - 1
        if num_gone > 0:
            if self.hides_rotation and self._cos is None:
                raise UnsupportedError(
                    "the window of this SinkCache is full, and transformers' models show caches no `cos` and `sin` any "
                    "more to move keys with; call unspool.generate(model, …) with it, or unspool.attach(model) first"
                )
            first = self._num_sinks + num_gone
            kept = self._turn_back(held_keys[:, :, first:], num_ahead, given)
            held_keys = torch.cat((held_keys[:, :, : self._num_sinks], kept), dim=-2)
            held_values = torch.cat((held_values[:, :, : self._num_sinks], held_values[:, :, first:]), dim=-2)
        self.keys[layer] = torch.cat((held_keys, keys), dim=-2)
        self.values[layer] = torch.cat((held_values, values), dim=-2)
        return self.keys[layer], self.values[layer]

    def _learn(self, cos: torch.Tensor | None, sin: torch.Tensor | None) -> None:
        """Keep the angles of the first positions: moving by `n` positions turns by the angles of position `n`."""
        if cos is None or sin is None:
            return
        if cos.dim() == 2:  # the whole table
            self._cos, self._sin = cos, sin
        elif self._cos is None or self._sin is None:
            self._cos, self._sin = cos[0], sin[0]
        elif self._cos.shape[0] < self._window:
            self._cos = torch.cat((self._cos, cos[0]))
            self._sin = torch.cat((self._sin, sin[0]))

    def _turn_back(self, keys: torch.Tensor, by: int, given: dict[str, Any]) -> torch.Tensor:
        if self._cos is None or self._sin is None or not keys.shape[-2] or by == 0:
            return keys
        width = given.get("partial_rotation_size") or self._cos.shape[-1]
        # A table may be scaled (YaRN): angles alone are wanted here.
        cos, sin = self._cos[by].float(), self._sin[by].float()
        norm = (cos.square() + sin.square()).sqrt()
        cos, sin = cos / norm, sin / norm
        turned, rest = keys[..., :width].float(), keys[..., width:]
        first, second = turned.chunk(2, dim=-1)
        half = torch.cat((-second, first), dim=-1)
        turned = (turned * cos - half * sin).to(keys.dtype)
        return turned if rest.shape[-1] == 0 else torch.cat((turned, rest), dim=-1)
