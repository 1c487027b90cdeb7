"""The surface that code written for the reference calls: `update`, `crop`, `to_legacy_cache` and their kin.

It stands on the contract (`base.Cache`) and on two methods of a kind: `_append`, which stores positions of one layer,
and `_show`, which returns a layer's keys and values. Nothing of unspool's own calls it while it decodes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self

import torch

from unspool.cache.span import Span
from unspool.cache.stores.memory import join
from unspool.errors import SettingError, UnsupportedError

KeysAndValues = tuple[torch.Tensor, torch.Tensor]  # keys and values (rows, heads, positions, width)
LegacyCache = tuple[KeysAndValues, ...]


class ReferenceSurface(ABC):
    """What every kind answers to."""

    lengths: list[int]
    takes_positions: bool = False  # update() writes at `cache_position` if it is given
    _updated: tuple[list[int], list[int]] | None = None  # the lengths it holds for, positions held by each layer
    _is_recording = False  # transformers decodes with drafts over it, whose crop(0) takes nothing away

    # --- what it stands on -----------------------------------------------------------------------------
    @abstractmethod
    def select_rows(self, index: Sequence[int]) -> None:
        """Keep, repeat or reorder rows: row `i` becomes what row `index[i]` was."""

    @abstractmethod
    def _open_rows(self, starts: Sequence[int], stops: Sequence[int], stop: int) -> None:
        """Check that so many rows fit, and make room for every row from its start to its stop."""

    def _append(self, layer: int, span: Span, kv: torch.Tensor) -> KeysAndValues:
        """Store `kv` (rows, new, 2, heads, width) in one layer; return the keys and values that `update` returns."""
        raise UnsupportedError(
            f"a {type(self).__name__} is written by unspool's own models; use merge() for a plain one"
        )

    def _show(self, layer: int) -> KeysAndValues:
        """A layer's keys and values as they are held."""
        raise UnsupportedError(f"a {type(self).__name__} can't show its keys layer by layer")

    def __len__(self) -> int:
        """Layers that hold keys."""
        return 0

    # --- writing ---------------------------------------------------------------------------------------
    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        cache_kwargs: dict[str, Any] | None = None,
        **__: Any,  # what transformers' models say about their attention
    ) -> KeysAndValues:
        """Append keys and values (rows, heads, new, width) to one layer; return all of that layer's."""
        if type(self)._append is ReferenceSurface._append:
            raise UnsupportedError(
                f"a {type(self).__name__} is written by unspool's own models; use merge() for a plain one"
            )
        rows, _, num_new, _ = key_states.shape
        if self.lengths and (len(self.lengths) != rows or len(set(self.lengths)) > 1):
            raise SettingError(
                f"update() appends to rows of one length and this cache's rows hold {self.lengths} positions for "
                f"{rows} given; unspool's own models write ragged rows through begin() and write()"
            )
        held = self.get_seq_length(layer_idx)
        given = (cache_kwargs or {}).get("cache_position") if self.takes_positions else None
        span = _plan_update(rows, num_new, held, given, key_states.device)
        self._open_rows(span.starts, [span.stop] * rows, span.stop)
        self.lengths = self.lengths or [0] * rows
        returned = self._append(layer_idx, span, join(key_states, value_states))
        filled = [self.get_seq_length(layer) for layer in range(len(self))]
        filled[layer_idx] = span.stop
        self.lengths = [filled[0]] * rows
        self._updated = (self.lengths, filled)
        return returned

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Reorder rows by index, as beam search asks for."""
        self.select_rows([int(i) for i in beam_idx])

    # --- reading ---------------------------------------------------------------------------------------
    def get_seq_length(self, layer_idx: int | None = 0) -> int:
        """Positions held by a layer (of the longest row)."""
        layer = layer_idx or 0
        if layer >= len(self):
            return 0
        if self._updated is not None and self._updated[0] is self.lengths:  # nothing has changed them since
            filled = self._updated[1]
            return filled[layer] if layer < len(filled) else 0
        return max(self.lengths, default=0)

    def get_query_offset(self, layer_idx: int | None = 0) -> int:
        """The position of a pass's first query, for the masks that transformers' models make."""
        return self.get_seq_length(layer_idx)

    def get_mask_sizes(self, query_length: int | torch.Tensor, layer_idx: int = 0) -> tuple[int, int]:
        """How many keys `update` will return for so many new positions, and the position of the first."""
        return self.get_seq_length(layer_idx) + count_queries(query_length), 0

    @property
    def is_sliding(self) -> tuple[bool, ...]:
        """Whether a layer keeps a window alone, for each layer."""
        return (False,) * len(self)

    @property
    def is_initialized(self) -> bool:
        """Whether anything was written."""
        return self.get_seq_length() > 0

    @property
    def layers(self) -> Any:
        """The layers, as transformers' models read keys from them that were written once."""
        return [LayerView(self, layer) for layer in range(len(self))]

    def activate_past_recording(self) -> None:
        """Called by transformers before it decodes with drafts: what follows may be taken back by `crop`."""
        if not hasattr(self, "crop"):
            raise UnsupportedError(
                f"a {type(self).__name__} can't take back what a drafter guessed wrong; use a DynamicCache, or leave "
                "the drafter out"
            )
        self._is_recording = True

    def is_recording_past(self, layer_idx: int = 0) -> bool:  # layers are alike
        """Whether more than the last states is kept, for the layers of transformers that keep states."""
        return False

    def get_max_length(self, layer_idx: int | None = None) -> int:  # layers are alike
        """The most positions this cache can hold; -1 if it grows."""
        limit = self.get_max_cache_shape()
        return -1 if limit is None else limit

    @property
    def seen_tokens(self) -> int:
        """Positions that went in (of the longest row)."""
        return max(self.lengths, default=0)

    def get_max_cache_shape(self) -> int | None:
        """The most positions this cache can hold; None if it grows."""
        return None

    def get_usable_length(self, new_seq_length: int, layer_idx: int | None = 0) -> int:
        """Positions that stay when `new_seq_length` more arrive."""
        limit, held = self.get_max_cache_shape(), self.get_seq_length(layer_idx)
        if limit is not None and held + new_seq_length > limit:
            return limit - new_seq_length
        return held

    def __getitem__(self, layer_idx: int) -> KeysAndValues:
        """A layer's keys and values: (rows, heads, positions, width)."""
        if not 0 <= layer_idx < len(self):
            raise KeyError(f"the cache has {len(self)} layers; layer {layer_idx} was asked for")
        return self._show(layer_idx)

    def __iter__(self) -> Iterator[KeysAndValues]:
        return (self[layer] for layer in range(len(self)))

    @property
    def key_cache(self) -> list[torch.Tensor]:
        """The keys held, one tensor per layer: (rows, heads, positions, width)."""
        return [self._show(layer)[0] for layer in range(len(self))]

    @property
    def value_cache(self) -> list[torch.Tensor]:
        """The values held, one tensor per layer: (rows, heads, positions, width)."""
        return [self._show(layer)[1] for layer in range(len(self))]


class GrowingSurface(ReferenceSurface):
    """What caches that grow answer to besides: they can be cut, split, joined, and turned into tuples."""

    @abstractmethod
    def truncate(self, lengths: Sequence[int]) -> None:
        """Roll every row back to the given length."""

    @abstractmethod
    def take_rows(self, index: Sequence[int]) -> Self:
        """A cache of the same kind that holds some of the rows."""

    @abstractmethod
    def join(self, other: Any) -> None:
        """Take in another cache's rows, after its own."""

    def crop(self, max_length: int) -> None:
        """Keep the first `max_length` positions; a negative number removes as many from the end."""
        if max_length == 0 and self._is_recording:
            return
        held = self.get_seq_length()
        keep = max_length if max_length >= 0 else held + max_length
        if keep < 0:
            raise SettingError(f"crop({max_length}) asks for more than the {held} positions held")
        self.truncate([min(keep, length) for length in self.lengths])

    def to_legacy_cache(self) -> LegacyCache:
        """Keys and values as a tuple of pairs, one per layer."""
        self.require_one_length()
        return tuple(self._show(layer) for layer in range(len(self)))

    def require_one_length(self) -> None:
        """Raise the error that says what tuples can't: that rows hold different numbers of positions."""
        if len(set(self.lengths)) > 1:
            raise SettingError(
                f"the rows hold {self.lengths} positions, and tuples of tensors can't say so; "
                "keep the cache itself, or read its tensors layer by layer (cache[layer])"
            )

    def _take_legacy(self, past_key_values: Iterable[KeysAndValues] | None) -> Self:
        for layer, (keys, values) in enumerate(past_key_values or ()):
            self.update(keys, values, layer)
        return self

    def batch_split(self, full_batch_size: int, split_size: int) -> list[Self]:
        """One cache for every `split_size` rows."""
        return [
            self.take_rows(range(first, min(first + split_size, full_batch_size)))
            for first in range(0, full_batch_size, split_size)
        ]

    @classmethod
    def from_batch_splits(cls, splits: Sequence[Self]) -> Self:
        """One cache with the rows of all the given ones."""
        whole = splits[0].take_rows(range(len(splits[0].lengths)))
        for part in splits[1:]:
            whole.join(part)
        return whole

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        self.select_rows([row for row in range(len(self.lengths)) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only the given rows."""
        self.select_rows([int(i) for i in indices])


class LayerView:
    """One layer of a cache: what it holds now."""

    def __init__(self, cache: ReferenceSurface, layer: int) -> None:
        self._cache = cache
        self._layer = layer

    @property
    def keys(self) -> torch.Tensor:
        """(rows, heads, positions, width)."""
        return self._cache[self._layer][0]

    @property
    def values(self) -> torch.Tensor:
        """The same of values."""
        return self._cache[self._layer][1]

    @property
    def is_initialized(self) -> bool:
        """Whether anything was written."""
        return self._cache.get_seq_length(self._layer) > 0

    def get_seq_length(self) -> int:
        """Positions held."""
        return self._cache.get_seq_length(self._layer)


def count_queries(query_length: int | torch.Tensor) -> int:
    """New positions of a pass: older releases of transformers give the positions themselves."""
    return query_length.shape[0] if isinstance(query_length, torch.Tensor) else int(query_length)


def _plan_update(rows: int, num_new: int, held: int, given: torch.Tensor | None, device: torch.device) -> Span:
    """The span that `update` writes: after what is held, or at the positions it was given."""
    first, stop, is_run = held, held + num_new, True
    if given is not None:
        first, stop = int(given[0]), max(held, int(given.max()) + 1)
        is_run = bool((given == torch.arange(first, first + num_new, device=given.device)).all())
    positions = given.to(device) if given is not None else torch.arange(first, stop, device=device)
    return Span([first] * rows, num_new, [num_new] * rows, stop, is_run, positions.expand(rows, num_new), device)
