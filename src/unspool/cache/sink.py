"""Attention sinks (Xiao et al., 2023): the first tokens and the last ones, for texts without end."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from unspool.cache.contract.capabilities import JOIN, RAGGED, SELECT_ROWS, TRIAL
from unspool.cache.reference import count_queries
from unspool.cache.sink_surface import ShiftedLayers
from unspool.cache.span import Mask, Span
from unspool.cache.stored import StoredCache
from unspool.cache.stores.memory import Room, split
from unspool.cache.stores.ring import RingStore
from unspool.errors import SettingError, UnsupportedError

BLOCK = 32  # positions after which the sinks move up behind the window


class KeyRotation(Protocol):
    """How a model enters positions into keys, so that keys can be placed anew."""

    @property
    def can_shift(self) -> bool:
        """Whether keys can be moved to other positions after they were made."""
        ...

    def find_turns(self, layer: int, shifts: torch.Tensor) -> torch.Tensor | None:
        """Factors (rows, 1, 1, pairs) that move a layer's keys by `shifts` (rows,) positions; None: they hold none."""
        ...


class SinkCache(StoredCache):
    """The first `num_sink_tokens` and the last positions, `window_length` in all: constant memory, texts without end.

    Position `t` sees the sinks as if they stood right before the window, so no distance outgrows what the model was
    trained on. Keys lie in a ring as they were rotated. The sinks follow the window in blocks of 32 positions: a
    distance to them is at most `window_length + 31`, and does not depend on how a text was cut into passes. When
    positions have grown by twice the window, everything is turned back, so that angles stay small.
    """

    can = frozenset({TRIAL, SELECT_ROWS, RAGGED, JOIN})
    is_in_order = False
    is_endless = True
    _store: RingStore

    def __init__(self, window_length: int, num_sink_tokens: int) -> None:
        check_sink({"window_length": window_length, "num_sink_tokens": num_sink_tokens})
        super().__init__(RingStore(Room(window_length), num_sink_tokens))
        self.window_length = window_length
        self.num_sink_tokens = num_sink_tokens
        self._rotation: KeyRotation | None = None
        self._origins: list[int] = []  # the position that counts as 0 for rotation, one per row
        self._shifts: list[int] = []  # how far the sinks stand from where they were written, one per row
        self._first_sinks: list[torch.Tensor] = []  # the sinks' keys as written, one per layer
        self._real: Span | None = None  # the span by positions of the text
        self._shifted = ShiftedLayers(window_length, num_sink_tokens)

    def attach(self, rotation: KeyRotation) -> None:
        if not rotation.can_shift:
            raise UnsupportedError(
                "a SinkCache moves keys to other positions, and this model learned its positions one by one: they end "
                "with its context. Use a model with rotary positions or ALiBi, or a DynamicCache"
            )
        self._rotation = rotation

    @property
    def room(self) -> int | None:
        return None

    @property
    def longest_pass(self) -> int | None:
        """Positions up to where the first row's sinks move next: a pass does not cross that."""
        return min((self._next_move(length) - length for length in self.lengths), default=self._next_move(0))

    def _next_move(self, position: int) -> int:
        return self._find_shift(position) + BLOCK + self.window_length - 1

    def _find_shift(self, position: int) -> int:
        """How far the sinks stand from their first places for the query at a position."""
        return max(0, position - self.window_length + 1) // BLOCK * BLOCK

    # --- a forward pass ------------------------------------------------------------------------------
    def begin(
        self,
        rows: int,
        num_new: int,
        counts: Sequence[int] | None = None,
        device: torch.device | str = "cpu",
    ) -> Span:
        if self._shifted.num_layers:
            raise SettingError("this SinkCache was filled through update(); go on with update(), or use a fresh one")
        real = self._real = super().begin(rows, num_new, counts, device)
        self._origins = self._origins or [0] * rows
        self._shifts = self._shifts or [0] * rows
        self._place_keys(real.starts)
        starts = [start - origin for start, origin in zip(real.starts, self._origins, strict=True)]
        origins = torch.tensor(self._origins, device=real.positions.device)[:, None]
        stop = max(starts) + num_new
        return Span(starts, num_new, real.counts, stop, len(set(starts)) == 1, real.positions - origins)

    def _place_keys(self, starts: list[int]) -> None:
        """Turn rows back whose angles have grown, and move the sinks of rows that entered a new block."""
        origins, shifts = list(self._origins), [self._find_shift(start) for start in starts]
        for row, start in enumerate(starts):
            if start - origins[row] >= 2 * self.window_length + BLOCK:
                origins[row] = start - self.window_length - BLOCK
        if origins != self._origins:
            self._turn_back([old - new for old, new in zip(self._origins, origins, strict=True)])
        standing = [shift - origin for shift, origin in zip(shifts, origins, strict=True)]
        if standing != [shift - origin for shift, origin in zip(self._shifts, self._origins, strict=True)]:
            self._move_sinks(standing)
        self._origins, self._shifts = origins, shifts

    def _turn_back(self, by: list[int]) -> None:
        tried = self._store.tried
        for layer, buffer in enumerate(self._store.buffers):
            factors = self._find_turns(layer, by, buffer.device)
            if factors is None:
                return
            recent = buffer[:, self.num_sink_tokens :, 0]  # (rows, places, heads, width)
            recent.copy_(turn_keys(recent, factors))
            if layer < len(tried):
                tried[layer] = [(_turn_pair(old, factors), _turn_pair(new, factors)) for old, new in tried[layer]]

    def _move_sinks(self, to: list[int]) -> None:
        if not self.num_sink_tokens:
            return
        if not self._first_sinks:
            self._first_sinks = [buffer[:, : self.num_sink_tokens, 0].clone() for buffer in self._store.buffers]
        for layer, buffer in enumerate(self._store.buffers):
            sinks, first = buffer[:, : self.num_sink_tokens, 0], self._first_sinks[layer]
            for row, (shift, origin) in enumerate(zip(self._shifts, self._origins, strict=True)):
                if shift == origin == 0:  # not moved since they were written
                    first[row] = sinks[row]
            factors = self._find_turns(layer, to, buffer.device)
            if factors is None:
                return
            sinks.copy_(turn_keys(first, factors))

    def _find_turns(self, layer: int, by: list[int], device: torch.device) -> torch.Tensor | None:
        if self._rotation is None:
            raise RuntimeError(
                "attach() must be called before the first pass: a SinkCache moves keys as the model does"
            )
        return self._rotation.find_turns(layer, torch.tensor(by, device=device))

    def places(self, *, in_order: bool = False) -> None:  # keys move between passes
        return None

    def advance(self, rows: int) -> None:
        raise UnsupportedError("a SinkCache is written through begin(), write() and end()")

    # --- what is in view -----------------------------------------------------------------------------
    def mask(self, span: Span, window: int | None = None) -> Mask:
        real = self._real
        assert real is not None
        if window is None:
            return self._store.mask(real, None)
        if real.stop <= min(window, self.window_length):
            return self._store.mask(real, None)  # nothing has left the window, and no sink has moved
        if not self._store.held_places and real.num_new <= min(window, self.window_length):
            return "causal"
        # A layer with a window of its own sees sinks where they stand now, as it sees all other keys.
        keys, moved = (each[:, None, None, :] for each in self._find_places())
        queries = real.positions[:, None, :, None]
        is_kept = (keys > queries - self._store.reach) | (keys < self.num_sink_tokens)
        return (keys >= 0) & (keys <= queries) & is_kept & (moved > queries - window)

    def key_positions(self, span: Span, window: int | None = None) -> torch.Tensor:
        """Where every key in view stands for the pass's queries: (rows, keys)."""
        _, moved = self._find_places()
        return (moved - torch.tensor(self._origins, device=moved.device)[:, None]).clamp(min=0)

    def _find_places(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The position of every key in the text, -1 where there is none, and where it stands: (rows, keys) each."""
        assert self._real is not None
        real = self._store.find_positions(self._real)
        shifts = torch.tensor(self._shifts, device=real.device)[:, None]
        moved = torch.where(real < self.num_sink_tokens, real + shifts, real)
        return real.expand_as(moved), moved

    # --- rows ----------------------------------------------------------------------------------------
    def truncate(self, lengths: Sequence[int]) -> None:
        self._check_lengths(lengths)
        self._store.check_truncation(self.lengths, lengths)
        for row, (length, origin) in enumerate(zip(lengths, self._origins, strict=True)):
            if 0 < length < origin:
                raise UnsupportedError(f"row {row} can't roll back to {length}: angles were turned back by {origin}")
        super().truncate(lengths)
        for row, length in enumerate(lengths):
            if length == 0:
                self._origins[row] = self._shifts[row] = 0

    def _select(self, index: torch.Tensor) -> None:
        rows = index.tolist()
        super()._select(index)
        self._first_sinks = [first[index.to(first.device)] for first in self._first_sinks]
        self._origins = [self._origins[row] for row in rows]
        self._shifts = [self._shifts[row] for row in rows]

    def _join(self, other: Any) -> None:
        if (other.window_length, other.num_sink_tokens) != (self.window_length, self.num_sink_tokens):
            raise SettingError(f"rows of a window of {other.window_length} can't join those of {self.window_length}")
        if self._shifted.num_layers or other._shifted.num_layers:
            raise SettingError("a SinkCache that was filled through update() can't be joined")
        mine, rows = len(self.lengths), len(other.lengths)
        has_moved = bool(self._first_sinks or other._first_sinks)
        written = (self._list_sinks(), other._list_sinks()) if has_moved else ((), ())
        super()._join(other)
        if has_moved:  # rows whose sinks have not moved have them where they were written
            self._first_sinks = [
                torch.cat([part[layer][:count] for part, count in zip(written, (mine, rows), strict=True) if part])
                for layer in range(len(written[1]))
            ]
        self._origins = [*self._origins[:mine], *other._origins]
        self._shifts = [*self._shifts[:mine], *other._shifts]

    def _list_sinks(self) -> list[torch.Tensor]:
        """The sinks' keys as they were written, one tensor per layer: (rows, sinks, heads, width)."""
        held = [buffer[:, : self.num_sink_tokens, 0] for buffer in self._store.buffers]
        return self._first_sinks or [each.clone() for each in held]

    @property
    def nbytes(self) -> int:
        """Bytes that keys and values take."""
        return self._store.nbytes + self._shifted.nbytes

    # --- copies and files ----------------------------------------------------------------------------
    def __deepcopy__(self, memo: dict[int, Any]) -> SinkCache:
        made = super().__deepcopy__(memo)
        assert isinstance(made, SinkCache)
        made._origins, made._shifts = list(self._origins), list(self._shifts)
        made._first_sinks = [first.clone() for first in self._first_sinks]
        made._shifted = copy.deepcopy(self._shifted)
        return made

    def _pack(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        if self._shifted.num_layers:
            raise UnsupportedError("a SinkCache that was filled through update() can't be saved")
        facts = {
            "window_length": self.window_length,
            "num_sink_tokens": self.num_sink_tokens,
            "origins": self._origins,
            "shifts": self._shifts,
        }
        tensors = {f"layer.{layer}": buffer for layer, buffer in enumerate(self._store.buffers)}
        return facts, tensors | {f"sinks.{layer}": first for layer, first in enumerate(self._first_sinks)}

    @classmethod
    def _unpack(cls, facts: dict[str, Any], tensors: dict[str, torch.Tensor], lengths: list[int]) -> SinkCache:
        cache = cls(facts["window_length"], facts["num_sink_tokens"])
        origins, shifts = ([int(n) for n in facts[name]] for name in ("origins", "shifts"))
        if not len(origins) == len(shifts) == len(lengths):
            raise ValueError(f"{len(origins)} origins and {len(shifts)} shifts for {len(lengths)} rows")
        if not all(0 <= n <= length for each in (origins, shifts) for n, length in zip(each, lengths, strict=True)):
            raise ValueError("positions are counted from beyond the text")
        num_layers = sum(name.startswith("layer.") for name in tensors)
        for layer in range(num_layers):
            held = tensors[f"layer.{layer}"]
            if held.dim() != 5 or held.shape[:3] != (len(lengths), cache.window_length, 2):
                raise ValueError(f"layer {layer} has the shape {list(held.shape)}")
            cache._store.fill(layer, held)
        if len(tensors) > num_layers:
            cache._first_sinks = [tensors[f"sinks.{layer}"].clone() for layer in range(num_layers)]
        cache.lengths, cache._origins, cache._shifts = lengths, origins, shifts
        return cache

    # --- the reference's surface ---------------------------------------------------------------------
    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        cache_kwargs: dict[str, Any] | None = None,
        **__: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append to one layer, for models that rotate by halves: `cos` and `sin` in `cache_kwargs` turn what is kept.

        The caller's next position is `get_seq_length()`, which ends at the window's length.
        """
        if self._store.num_layers:
            raise SettingError("this SinkCache was filled by a model of unspool's; go on with that, or use a fresh one")
        return self._shifted.update(key_states, value_states, layer_idx, cache_kwargs or {})

    def get_seq_length(self, layer_idx: int | None = 0) -> int:
        """Positions kept: at most `window_length`."""
        if self._shifted.num_layers:
            return self._shifted.count(layer_idx or 0)
        return min(max(self.lengths, default=0), self.window_length)

    def get_query_offset(self, layer_idx: int | None = 0) -> int:
        """The same, asked by releases of transformers whose models pass no angles to caches."""
        self._shifted.hides_rotation = True
        return self.get_seq_length(layer_idx)

    def get_mask_sizes(self, query_length: int | torch.Tensor, layer_idx: int = 0) -> tuple[int, int]:
        held, num_new = self.get_seq_length(layer_idx), count_queries(query_length)
        num_gone = min(max(0, held + num_new - self.window_length), max(0, held - self.num_sink_tokens))
        return held + num_new - num_gone, 0

    def get_max_cache_shape(self) -> int:
        return self.window_length

    @property
    def seen_tokens(self) -> int:
        """Positions that went in, kept or not."""
        return self._shifted.num_seen or max(self.lengths, default=0)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._shifted.reorder(beam_idx)
        super().reorder_cache(beam_idx)

    def _show(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What is kept, oldest first."""
        if self._shifted.num_layers:
            return self._shifted.keys[layer], self._shifted.values[layer]
        if len(set(self.lengths)) > 1:
            raise SettingError(f"the rows hold {self.lengths} positions, and one tensor can't show them in order")
        return split(self._store.read(layer, len(self.lengths), self.lengths[0])[:, : self.get_seq_length()])

    def __len__(self) -> int:
        return self._store.num_layers or self._shifted.num_layers


def check_sink(options: Any) -> None:
    """Raise for a window or a number of sinks that can't be."""
    for name in ("window_length", "num_sink_tokens"):
        value = options.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 2**24:
            raise SettingError(f"a sink cache needs `{name}`, a whole number; got {value!r}")
    if options["window_length"] <= options["num_sink_tokens"]:
        raise SettingError(
            f"a sink cache of window_length={options['window_length']} has no place for anything but its "
            f"{options['num_sink_tokens']} sinks; make the window longer"
        )


def turn_keys(keys: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Keys (rows, places, heads, width) with the pairs at their front turned by (rows, 1, 1, pairs)."""
    width = 2 * factors.shape[-1]
    pairs = torch.view_as_complex(keys[..., :width].float().reshape(*keys.shape[:-1], -1, 2))
    turned = torch.view_as_real(pairs * factors).flatten(-2).to(keys.dtype)
    return turned if width == keys.shape[-1] else torch.cat((turned, keys[..., width:]), dim=-1)


def _turn_pair(kv: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """The same for keys that have their values beside them (rows, places, 2, heads, width)."""
    return torch.stack((turn_keys(kv[:, :, 0], factors), kv[:, :, 1]), dim=2)
