"""How a transformers model turns its keys by their positions, so that attention sinks can move them."""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass
from typing import Any, Literal

import torch

Layout = Literal["halves", "neighbours"]
_STEADY = ("default", "linear", "llama3", "yarn")  # others change their frequencies with the length of a text


@dataclass(frozen=True)
class Rotation:
    """The frequencies of every layer, and which numbers of a key turn together."""

    frequencies: tuple[torch.Tensor, ...]  # a layer each: (pairs,)
    layout: Layout

    @property
    def can_shift(self) -> bool:
        """Whether keys can be moved to other positions: a rotation can always be gone on with."""
        return True

    def find_turns(self, layer: int, shifts: torch.Tensor) -> torch.Tensor:
        """Factors (rows, 1, 1, pairs) that move a layer's keys by `shifts` (rows,) positions."""
        angles = shifts.double()[:, None] * self.frequencies[layer].to(shifts.device).double()
        return torch.polar(torch.ones_like(angles), angles).to(torch.complex64)[:, None, None]

    def pair_up(self, layer: int, keys: torch.Tensor) -> torch.Tensor:
        """Keys (…, width) with numbers that turn together side by side, as unspool's caches turn them."""
        if self.layout == "neighbours":
            return keys
        width = 2 * len(self.frequencies[layer])
        halves = keys[..., :width].reshape(*keys.shape[:-1], 2, -1).transpose(-1, -2).flatten(-2)
        return torch.cat((halves, keys[..., width:]), dim=-1)

    def part(self, layer: int, keys: torch.Tensor) -> torch.Tensor:
        """What `pair_up` gave, as the model had it."""
        if self.layout == "neighbours":
            return keys
        width = 2 * len(self.frequencies[layer])
        pairs = keys[..., :width].reshape(*keys.shape[:-1], -1, 2).transpose(-1, -2).flatten(-2)
        return torch.cat((pairs, keys[..., width:]), dim=-1)


def find_rotation(model: Any, config: Any) -> Rotation | None:
    """A model's rotation, where all of it is known; None where keys can't be moved."""
    if hasattr(config, "qk_rope_head_dim"):
        return None  # only the end of such keys is turned
    layout = _find_layout(model)
    told = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    by_kind = [part for part in told.values() if isinstance(part, dict)] or [told]
    if layout is None or any(str(part.get("rope_type", "default")) not in _STEADY for part in by_kind):
        return None
    tables: dict[str, torch.Tensor] = {}
    for part in model.modules():
        for name, buffer in part.named_buffers(recurse=False):
            if not name.endswith("inv_freq") or name.startswith("original"):
                continue
            if name in tables and not torch.equal(tables[name], buffer):
                return None  # two rotations, and nothing says which layer has which
            if not name.endswith("original_inv_freq"):
                tables[name] = buffer.detach()
    num_layers = int(config.num_hidden_layers)
    kinds = getattr(config, "layer_types", None) or [""] * num_layers
    found = [tables.get(f"{kind}_inv_freq", tables.get("inv_freq")) for kind in kinds]
    known = tuple(table for table in found if table is not None)
    return Rotation(known, layout) if len(known) == num_layers else None


def _find_layout(model: Any) -> Layout | None:
    """Which numbers its code turns together: its own function is asked, on a key of eight numbers."""
    apply = getattr(sys.modules.get(type(model).__module__), "apply_rotary_pos_emb", None)
    if apply is None or list(inspect.signature(apply).parameters)[:4] != ["q", "k", "cos", "sin"]:
        return None
    angles = torch.tensor([0.3, 1.1, 2.0, 0.7])
    key = torch.arange(1.0, 9.0).view(1, 1, 1, 8)
    turns = torch.polar(torch.ones(4), angles)
    for layout, spread in (("halves", torch.cat((angles, angles))), ("neighbours", angles.repeat_interleave(2))):
        rotation = Rotation((angles,), "halves" if layout == "halves" else "neighbours")
        pairs = torch.view_as_complex(rotation.pair_up(0, key).reshape(1, 1, 1, 4, 2))
        expected = rotation.part(0, torch.view_as_real(pairs * turns).flatten(-2))
        for told in (spread, torch.cat((angles, angles))):  # some spread the angles themselves
            try:
                _, turned = apply(key, key, told.cos().view(1, 1, 8), told.sin().view(1, 1, 8))
            except (RuntimeError, TypeError, ValueError, IndexError):
                continue
            if turned.shape == expected.shape and torch.allclose(turned, expected, atol=1e-5):
                return rotation.layout
    return None
