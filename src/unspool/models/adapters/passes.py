"""One forward pass over a cache of ours, in transformers' terms: inputs, mask, keys.

There are two kinds, and a model's description says which one it needs:
- `PlacedPass`: rows are right-filled and keys stay at the indices of their positions. Every row is given its own
  positions and a 4-D mask, so a ragged batch costs nothing more.
- `AlignedPass`: rows end in one column, with a 2-D mask over what lies before their beginning, as transformers' own
  generate() has them. Any model takes that. If rows differ in length, keys are shifted in every layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from unspool.cache import BranchedKeys, Cache, Span
from unspool.cache.stores.memory import join
from unspool.kernels.packed_keys import PackedKeys
from unspool.models.adapters.description import Description
from unspool.protocols import LayerKind


class AdapterPass:
    """What both kinds share: keys are written into the cache and come back as plain tensors."""

    def __init__(self, description: Description, cache: Cache, span: Span) -> None:
        self._description = description
        self._cache = cache
        self._span = span
        self.num_written = 0  # layers
        # Numbers of columns: before the model's queries, and in all.
        self.num_before, self.num_columns = span.starts[0], span.stop

    @property
    def num_rows(self) -> int:
        """The rows of the pass."""
        return len(self._span.starts)

    def update(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store a layer's new keys and values (rows, heads, new, width); return all that its queries may read."""
        raise NotImplementedError

    def _write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        widths = keys.shape[-1], values.shape[-1]
        if widths[0] != widths[1]:  # a cache stores both side by side
            self._description.widths[layer] = widths
            widest = max(widths)
            keys, values = (torch.nn.functional.pad(part, (0, widest - part.shape[-1])) for part in (keys, values))
        turns = self._description.rotation if self._cache.is_endless else None
        if turns is not None:
            keys = turns.pair_up(layer, keys)
        read_keys, read_values = (self._show(part, layer) for part in self._write_all(layer, join(keys, values)))
        self.num_written += 1
        if turns is not None:
            read_keys = turns.part(layer, read_keys)
        if widths[0] != widths[1]:
            return read_keys[..., : widths[0]], read_values[..., : widths[1]]
        return read_keys, read_values

    def _write_all(self, layer: int, kv: torch.Tensor) -> tuple[Any, Any]:
        return self._cache.write(layer, kv)

    def _show(self, part: Any, layer: int) -> torch.Tensor:
        """Keys (or values) in any form, as a tensor (rows, heads, keys, width)."""
        if isinstance(part, torch.Tensor):
            return part.contiguous() if self._description.attends_itself else part
        if isinstance(part, PackedKeys):
            return part.unpack(self._count_keys(self._kind_of(layer)))
        assert isinstance(part, BranchedKeys)
        num_branches = part.own.shape[0] // part.shared.shape[0]
        return torch.cat((part.shared.repeat_interleave(num_branches, dim=0), part.own), dim=2)

    def _kind_of(self, layer: int) -> LayerKind:
        return self._description.info.layer_kinds[layer]

    def _window_of(self, kind: LayerKind) -> int | None:
        return self._description.info.window if kind == "sliding" else None

    def _count_keys(self, kind: LayerKind) -> int:
        """Keys in view of layers of a kind."""
        window = self._window_of(kind)
        if self._cache.stands_in_order(window):
            return self._span.stop
        return self._cache.key_positions(self._span, window).shape[1]


class PlacedPass(AdapterPass):
    """A pass in which keys stay at their indices."""

    def make_inputs(self, new: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, dict[str, Any]]:
        """The tokens or embeddings as the model takes them, and its further inputs."""
        span = self._span
        # What is past a short row's end is never read, so it may have any valid position.
        last = max(start + count for start, count in zip(span.starts, span.counts, strict=True)) - 1
        positions = span.positions if self._cache.is_endless else span.positions.clamp(max=max(last, 0))
        return new, {"position_ids": positions, "attention_mask": self._make_masks(dtype)}

    def update(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._write(layer, keys, values)

    def restore(self, states: torch.Tensor) -> torch.Tensor:
        """What the model returned for the new columns (rows, new, …), right-filled: it is already."""
        return states

    def restore_weights(self, weights: torch.Tensor) -> torch.Tensor:
        """Attention weights (rows, heads, new, keys) with a key's weight at the index of its position."""
        return self._cache.order_weights(weights)

    def find_last(self) -> list[int]:
        """The column of each row's last new token."""
        return [max(count - 1, 0) for count in self._span.counts]

    def _make_masks(self, dtype: torch.dtype) -> Any:
        """None if the model's own mask is right; else additive masks, one for all layers or a dict by kind."""
        kinds: list[LayerKind] = sorted(set(self._description.info.layer_kinds))
        windows = {kind: self._window_of(kind) for kind in kinds}
        masks = {kind: self._cache.mask(self._span, window) for kind, window in windows.items()}
        is_plain = all(mask is None or isinstance(mask, str) for mask in masks.values())
        is_known = is_plain and all(map(self._cache.stands_in_order, windows.values()))
        if is_known and not self._description.asks_for_mask:
            return None
        made = {kind: self._add_up(kind, mask, dtype) for kind, mask in masks.items()}
        names = self._description.mask_names
        return {names[kind]: mask for kind, mask in made.items()} if names else made[kinds[0]]

    def _add_up(self, kind: LayerKind, mask: Any, dtype: torch.dtype) -> torch.Tensor:
        """A mask in any form as an additive one: (rows, 1, new, keys)."""
        span = self._span
        if isinstance(mask, str):
            mask = torch.ones(1, 1, span.num_new, span.num_new, dtype=torch.bool, device=span.device).tril()
        if mask is None:
            added = torch.zeros(1, 1, span.num_new, self._count_keys(kind), dtype=dtype, device=span.device)
        else:
            added = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
            added.masked_fill_(~mask, torch.finfo(dtype).min)  # not -inf, which some attentions turn into NaN
        return added.expand(self.num_rows, -1, -1, -1)


class AlignedPass(AdapterPass):
    """A pass in which all rows end in the last column."""

    def __init__(self, description: Description, cache: Cache, span: Span) -> None:
        super().__init__(description, cache, span)
        self._ends = [start + count for start, count in zip(span.starts, span.counts, strict=True)]
        self.num_columns = max(*self._ends, span.num_new) if len(self._ends) > 1 else max(self._ends[0], span.num_new)
        self.num_before = self.num_columns - span.num_new
        self.is_straight = min(self._ends) == self.num_columns and min(span.counts) == span.num_new
        if not self.is_straight:
            device = span.positions.device
            self._shifts = torch.tensor([self.num_columns - end for end in self._ends], device=device)[:, None]
            missing = torch.tensor([span.num_new - count for count in span.counts], device=device)[:, None]
            column = torch.arange(span.num_new, device=device)
            self._to_end = (column - missing).clamp(min=0)  # (rows, new): from right-filled to the last columns
            self._from_end = (column + missing).clamp(max=span.num_new - 1)  # and back
            self._is_real = column < span.num_new - missing

    def make_inputs(self, new: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, dict[str, Any]]:
        """The tokens or embeddings as the model takes them, and its further inputs."""
        span, device = self._span, new.device
        inputs: dict[str, Any] = {}
        takes_positions = "position_ids" in self._description.arguments
        if self.is_straight:
            inputs["attention_mask"] = torch.ones(self.num_rows, self.num_columns, dtype=torch.int64, device=device)
            if takes_positions:
                inputs["position_ids"] = span.positions
            return new, inputs
        column = torch.arange(self.num_columns, device=device)
        inputs["attention_mask"] = (column >= self._shifts).long()
        if takes_positions:
            inputs["position_ids"] = (column[self.num_before :] - self._shifts).clamp(min=0)
        return _take_columns(new, self._to_end), inputs

    def update(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_straight:
            # Past a short row's end there must be zeros: masked values are still multiplied.
            real = self._is_real[:, None, :, None]
            keys, values = (
                _take_columns(part.transpose(1, 2), self._from_end).transpose(1, 2).masked_fill(~real, 0.0)
                for part in (keys, values)
            )
        read_keys, read_values = self._write(layer, keys, values)
        kind = self._kind_of(layer)
        if not self._cache.stands_in_order(self._window_of(kind)):
            return self._lay_out(kind, read_keys), self._lay_out(kind, read_values)
        if self.is_straight:
            return read_keys, read_values
        return self._shift(read_keys), self._shift(read_values)

    def _shift(self, keys: torch.Tensor) -> torch.Tensor:
        """Keys at the indices of their positions (rows, heads, stop, width), shifted so that all rows end together."""
        column = torch.arange(self.num_columns, device=keys.device)
        index = (column - self._shifts.to(keys.device)).clamp(0, keys.shape[2] - 1)  # (rows, columns)
        return _take_columns(keys.transpose(1, 2), index).transpose(1, 2)

    def _lay_out(self, kind: LayerKind, keys: torch.Tensor) -> torch.Tensor:
        """Keys of a ring put into the columns of their positions; no query sees those that the window dropped."""
        window, span = self._window_of(kind), self._span
        rows, heads, num_keys, width = keys.shape
        positions = self._cache.key_positions(span, window).expand(rows, num_keys)
        ends = torch.tensor(self._ends, device=positions.device)[:, None]
        is_held = positions < ends
        mask = self._cache.mask(span, window)
        if isinstance(mask, torch.Tensor):  # a ring may have empty slots: keys that no query sees are left out
            counts = torch.tensor(span.counts, device=positions.device)[:, None]
            is_asked = torch.arange(span.num_new, device=positions.device) < counts  # (rows, new)
            is_held = is_held & (mask[:, 0] & is_asked[:, :, None]).any(1)
        columns = torch.where(is_held, positions + self.num_columns - ends, self.num_columns)
        laid = keys.new_zeros(rows, self.num_columns + 1, heads, width)
        laid[torch.arange(rows, device=keys.device)[:, None], columns] = keys.transpose(1, 2)
        return laid[:, : self.num_columns].transpose(1, 2)

    def restore(self, states: torch.Tensor) -> torch.Tensor:
        """What the model returned for the new columns (rows, new, …), right-filled."""
        return states if self.is_straight else _take_columns(states, self._from_end)

    def restore_weights(self, weights: torch.Tensor) -> torch.Tensor:
        """Attention weights (rows, heads, new, keys) with a key's weight at the index of its position."""
        if self.is_straight:
            return weights
        restored = _take_columns(weights.transpose(1, 2), self._from_end).transpose(1, 2)
        index = torch.arange(self._span.stop, device=weights.device) + self._shifts  # (rows, positions)
        is_there = index < self.num_columns
        index = index.clamp(max=self.num_columns - 1)[:, None, None].expand(*restored.shape[:3], -1)
        return restored.gather(-1, index).masked_fill(~is_there[:, None, None], 0.0)

    def find_last(self) -> list[int]:
        """The column of each row's last new token."""
        return [self._span.num_new - 1] * self.num_rows


class Measurement(AdapterPass):
    """A pass over one token that stores nothing and records the shape of every layer's keys."""

    def __init__(self, description: Description, cache: Cache, span: Span) -> None:
        super().__init__(description, cache, span)
        self.shapes: list[tuple[int, int]] = []  # heads and width

    def update(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.shapes.append((keys.shape[1], max(keys.shape[3], values.shape[3])))
        self.num_written += 1
        return keys, values


class Harvest(Measurement):
    """A measurement that also collects the cross-attention keys of the encoder's states."""

    def __init__(self, description: Description, cache: Cache, span: Span) -> None:
        super().__init__(description, cache, span)
        self.source: list[tuple[torch.Tensor, torch.Tensor]] = []  # keys and values (rows, heads, source, width)

    def take_source(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store a layer's cross-attention keys and values."""
        self.source.append((keys, values))


def make_pass(description: Description, cache: Cache, span: Span) -> PlacedPass | AlignedPass:
    """The kind of pass that a model needs."""
    return (PlacedPass if description.why_aligned is None else AlignedPass)(description, cache, span)


def pick_columns(states: torch.Tensor, columns: Sequence[int]) -> torch.Tensor:
    """One column of every row: (rows, columns, …) to (rows, …)."""
    if len(set(columns)) == 1:
        return states[:, columns[0]]
    rows = torch.arange(len(columns), device=states.device)
    return states[rows, torch.tensor(list(columns), device=states.device)]


def _take_columns(states: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The columns at `index` (rows, columns) of (rows, old columns, …)."""
    rows = torch.arange(states.shape[0], device=states.device)[:, None]
    return states[rows, index.to(states.device)]
