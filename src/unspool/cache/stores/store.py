"""What every store of keys and values does; a cache (`stored.py`) has one store, or one for each kind of layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

import torch

from unspool.cache.places import Places
from unspool.cache.span import Mask, Span, see_positions
from unspool.cache.stores.memory import KeyFormat
from unspool.errors import SettingError
from unspool.kernels.ragged import Ragged


class Store(ABC):
    """Keys and values of layers that hold them alike, numbered from 0 in each store."""

    @property
    def is_trying(self) -> bool:
        """Whether a trial has begun, which keeps what its passes write over."""
        return False

    @property
    def sees_by_position(self) -> bool:
        """Whether keys of this pass are packed, and attention works out what may be seen."""
        return False

    @property
    @abstractmethod
    def num_layers(self) -> int:
        """Layers that there is memory for."""

    @abstractmethod
    def add_layer(self, layer: int, rows: int, keys: KeyFormat) -> None:
        """Take the memory of the next layer; nothing to do if it has some."""

    def _check_order(self, layer: int) -> bool:
        """Whether a layer is new; raises if one before it is missing."""
        if layer > self.num_layers:
            raise SettingError(f"layer {layer} is written before layer {self.num_layers}")
        return layer == self.num_layers

    def _ensure_layer(self, layer: int, rows: int, kv: torch.Tensor) -> None:
        """Take the memory of a layer that nothing was written to yet, for keys and values (…, heads, width)."""
        if layer >= self.num_layers:
            self.add_layer(layer, rows, KeyFormat.of(kv))

    # --- a pass --------------------------------------------------------------------------------------
    def open(self, rows: int) -> None:
        """Begin with rows that hold nothing."""

    @abstractmethod
    def reserve(self, starts: Sequence[int], stops: Sequence[int], stop: int) -> None:
        """Make room for every row from its start to its stop, or raise and change nothing; the pass ends at `stop`."""

    def begin(self, span: Span) -> None:
        """Work out once what all layers of a pass need."""

    @abstractmethod
    def write(self, layer: int, span: Span, kv: torch.Tensor) -> tuple[Any, Any]:
        """Store `kv` (rows, new, 2, heads, width); return the keys and values that the queries see."""

    def write_flat(self, layer: int, span: Span, kv: torch.Tensor, ragged: Ragged) -> tuple[torch.Tensor, torch.Tensor]:
        """Store real tokens `kv` (tokens, 2, heads, width); return keys and values (rows, room, heads, width)."""
        raise NotImplementedError

    def end(self, lengths: Sequence[int]) -> None:
        """Close a pass, after which rows have these lengths."""

    def catch_up(self, lengths: Sequence[int]) -> None:
        """Do what is due after steps that wrote by address, which no `end` follows."""

    def count_steps(self, lengths: Sequence[int]) -> int | None:
        """Steps that may be taken at once before the store changes what it holds; None if it never does."""
        return None

    # --- what is in view -----------------------------------------------------------------------------
    def mask(self, span: Span, window: int | None) -> Mask:
        """What the queries may see among the keys in view."""
        return see_positions(span, window)

    def key_positions(self, span: Span, window: int | None = None) -> torch.Tensor:  # mixed ones ask
        """The position of every key in view: (rows or 1, keys)."""
        return torch.arange(span.stop, device=span.positions.device)[None]

    def is_in_order(self, window: int | None) -> bool:
        """Whether layers with that window find every key at the index of its position."""
        return True

    # --- candidates after every row ------------------------------------------------------------------
    def write_forks(
        self, layer: int, kv: torch.Tensor, place: int | None, find_slots: Callable[[], torch.Tensor], stop: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store candidates (rows, forks, 2, heads, width) from one place on, or at places (rows, forks); return the
        first `stop` keys."""
        raise NotImplementedError

    def keep_forks(self, chosen: torch.Tensor, lengths: Sequence[int]) -> None:
        """Move every row's chosen candidate to the row's end."""
        raise NotImplementedError

    # --- rows ----------------------------------------------------------------------------------------
    @abstractmethod
    def select(self, index: Sequence[int], lengths: Sequence[int]) -> None:
        """Let row `i` become what row `index[i]` was; `lengths` are those of the rows before."""

    @abstractmethod
    def join(self, other: Any, mine: Sequence[int], theirs: Sequence[int]) -> None:
        """Take in another store's rows of lengths `theirs` after its own, or raise and change nothing."""

    def begin_trial(self, lengths: Sequence[int]) -> None:
        """Keep from now on what it takes to go back to any length since."""

    def check_truncation(self, held: Sequence[int], lengths: Sequence[int]) -> None:
        """Raise if rows that hold `held` positions can't go back to `lengths`."""

    def truncate(self, lengths: Sequence[int]) -> None:
        """Go back to lengths that were checked; ends a trial."""

    def clear(self) -> None:
        """Forget everything and keep the memory."""
        raise NotImplementedError

    @abstractmethod
    def clone(self) -> Self:
        """A store that holds the same and goes its own way from here."""

    # --- memory --------------------------------------------------------------------------------------
    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes taken."""

    @abstractmethod
    def held(self) -> list[torch.Tensor]:
        """One tensor per layer whose last dimensions are heads and width."""

    def places(self) -> Places | None:
        """Where the keys lie; the same object until something has moved; None if they are not read by address."""
        return None

    def last_places(self) -> Places | None:
        """The same, without sending a device what has changed of it since the last pass."""
        return self.places()

    def steady(self) -> AbstractContextManager[Any]:
        """Inside it nothing moves that another thread could move."""
        return nullcontext()

    @abstractmethod
    def read(self, layer: int, rows: int, length: int) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """A layer's keys and values in order, for rows that hold at most `length` positions."""
