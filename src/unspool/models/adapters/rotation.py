"""A transformers model's rotary embedding of keys, so that attention sinks can move them."""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass
from typing import Any, Literal

import torch

RotationLayout = Literal["halves", "neighbours"]
_STEADY = ("default", "linear", "llama3", "yarn")  # others change their frequencies with the sequence length


@dataclass(frozen=True)
class Rotation:
    """The frequencies of every layer, and which numbers of a key form a pair."""

    frequencies: tuple[torch.Tensor, ...]  # one per layer: (pairs,)
    layout: RotationLayout

    @property
    def can_shift(self) -> bool:
        """Whether keys can be moved to other positions: rotated keys can always be rotated further."""
        return True

    def find_turns(self, layer: int, shifts: torch.Tensor) -> torch.Tensor:
        """Factors (rows, 1, 1, pairs) that move a layer's keys by `shifts` (rows,) positions."""
        angles = shifts.double()[:, None] * self.frequencies[layer].to(shifts.device).double()
        return torch.polar(torch.ones_like(angles), angles).to(torch.complex64)[:, None, None]

    def pair_up(self, layer: int, keys: torch.Tensor) -> torch.Tensor:
        """Keys (…, width) with pairs as neighbours, as unspool's caches rotate them."""
        if self.layout == "neighbours":
            return keys
        width = 2 * len(self.frequencies[layer])
        halves = keys[..., :width].reshape(*keys.shape[:-1], 2, -1).transpose(-1, -2).flatten(-2)
        return torch.cat((halves, keys[..., width:]), dim=-1)

    def part(self, layer: int, keys: torch.Tensor) -> torch.Tensor:
        """The inverse of `pair_up`."""
        if self.layout == "neighbours":
            return keys
        width = 2 * len(self.frequencies[layer])
        pairs = keys[..., :width].reshape(*keys.shape[:-1], -1, 2).transpose(-1, -2).flatten(-2)
        return torch.cat((pairs, keys[..., width:]), dim=-1)


def find_rotation(model: Any, config: Any) -> Rotation | None:
    """A model's rotation, if all of it is known; None if keys can't be moved."""
    if hasattr(config, "qk_rope_head_dim"):
        return None  # only the end of such keys is rotated
    layout = _find_layout(model)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    by_kind = [part for part in rope.values() if isinstance(part, dict)] or [rope]
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


def _find_layout(model: Any) -> RotationLayout | None:
    """Which numbers its code pairs, found by calling its own function on a key of eight numbers."""
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
        for candidate in (spread, torch.cat((angles, angles))):  # some spread the angles themselves
            try:
                _, turned = apply(key, key, candidate.cos().view(1, 1, 8), candidate.sin().view(1, 1, 8))
            except (RuntimeError, TypeError, ValueError, IndexError):
                continue
            if turned.shape == expected.shape and torch.allclose(turned, expected, atol=1e-5):
                return rotation.layout
    return None
