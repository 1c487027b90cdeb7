"""Every position at its own place: one buffer (rows, positions, 2, heads, width) per layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from operator import is_
from typing import TYPE_CHECKING, Self

import torch

from unspool.cache.places import Places
from unspool.cache.span import Span
from unspool.cache.stores.memory import CHUNK, KeyFormat, Room, round_up, split
from unspool.cache.stores.store import Store
from unspool.kernels.presence import has_triton
from unspool.kernels.ragged import Ragged
from unspool.kernels.sending import send

if TYPE_CHECKING:
    from unspool.kernels.gpu.attention.forks import ForkKeeper
    from unspool.kernels.gpu.attention.row_copies import RowMover


class PlainStore(Store):
    """Whole rows in buffers that grow, or that are taken once.

    Keys and values of a position lie side by side, so that one copy stores a native model's fused QKV product.
    """

    def __init__(self, room: Room) -> None:
        self.room = room
        self.buffers: list[torch.Tensor] = []
        self._places: Places | None = None
        self._keeper: tuple[Places, ForkKeeper] | None = None  # for as long as the places are these
        self._mover: tuple[Places, RowMover] | None = None  # likewise

    @property
    def num_layers(self) -> int:
        return len(self.buffers)

    def add_layer(self, layer: int, rows: int, keys: KeyFormat) -> None:
        if self._check_order(layer):
            shape = (self.room.rows or rows, self.room.positions, 2, keys.heads, keys.width)
            self.buffers.append(self._take(shape, keys.dtype, keys.device))

    def _take(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self.room.take(shape, dtype, device)

    def rows_of(self, layer: int, rows: int) -> torch.Tensor:
        """A layer's buffer, without rows that are kept for later."""
        buffer = self.buffers[layer]
        return buffer if buffer.shape[0] == rows else buffer.narrow(0, 0, rows)

    # --- a pass --------------------------------------------------------------------------------------
    def reserve(self, starts: Sequence[int], stops: Sequence[int], stop: int) -> None:
        if stop > self.room.positions:
            self.grow(stop)

    def grow(self, stop: int) -> None:
        """Make room for more positions."""
        # A part more than is needed: a text that grows for long is copied seldom, and little is left empty.
        held, room = self.room.positions, round_up(stop) + stop // 32 // CHUNK * CHUNK
        self._places = self._mover = None  # or they would keep the old ones
        try:
            for layer, buffer in enumerate(self.buffers):  # one layer at a time, so that only one is there twice
                grown = self._take((buffer.shape[0], room, *buffer.shape[2:]), buffer.dtype, buffer.device)
                grown.narrow(1, 0, held).copy_(buffer)
                self.buffers[layer] = grown
        except BaseException:  # memory ran out: all layers have the room that they had
            self.buffers[:] = [buffer.narrow(1, 0, held) for buffer in self.buffers]
            raise
        self.room.positions = room

    def write(self, layer: int, span: Span, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = kv.shape[0]
        self._ensure_layer(layer, rows, kv)
        return split(put(self.rows_of(layer, rows), span, kv))

    def write_flat(self, layer: int, span: Span, kv: torch.Tensor, ragged: Ragged) -> tuple[torch.Tensor, torch.Tensor]:
        rows = len(span.starts)
        self._ensure_layer(layer, rows, kv)
        buffer = self.rows_of(layer, rows)
        buffer.index_put_((ragged.rows, ragged.positions), kv)
        keys, values = buffer.unbind(2)
        return keys, values

    # --- rows ----------------------------------------------------------------------------------------
    def select(self, index: Sequence[int], lengths: Sequence[int]) -> None:
        held = max(lengths, default=0)
        chosen = torch.tensor(list(index), dtype=torch.int64)
        if self.room.is_fixed:
            for buffer in self.buffers:
                part = buffer.narrow(1, 0, held)
                part[: len(index)] = part[chosen.to(buffer.device)]
            return
        self._places = self._mover = None  # or they would keep the old ones
        if self._let_leave(index, held):
            return
        grows = len(index) > len(lengths)
        grown: list[torch.Tensor] = []
        for layer, buffer in enumerate(self.buffers):
            new = self._take((len(index), *buffer.shape[1:]), buffer.dtype, buffer.device)
            rows = chosen.to(buffer.device)
            torch.index_select(buffer.narrow(1, 0, held), 0, rows, out=new.narrow(1, 0, held))
            if grows:  # all layers or none, should memory run out: layers must not differ in their rows
                grown.append(new)
            else:
                self.buffers[layer] = new
        self.buffers = grown if grows else self.buffers

    def _let_leave(self, index: Sequence[int], held: int) -> bool:
        """Move the rows that stay together, within the memory that they have; False if rows change their order, or if
        less than half of the memory would be in use."""
        rows, changes = len(index), (place for place, row in enumerate(index) if row != place)
        if not rows or any(row >= after for row, after in pairwise(index)):
            return False
        storages = [buffer.untyped_storage() for buffer in self.buffers]
        shared = Counter(storage.data_ptr() for storage in storages)  # by layers that were made together
        for buffer, storage in zip(self.buffers, storages, strict=True):
            if 2 * rows * buffer[0].nbytes * shared[storage.data_ptr()] <= storage.nbytes():
                return False
        first = next(changes, rows)
        chosen = torch.tensor(list(index[first:]), dtype=torch.int64)
        for layer, buffer in enumerate(self.buffers):
            if first < rows:
                part = buffer.narrow(1, 0, held)
                part[first:rows] = part.index_select(0, chosen.to(buffer.device))
            self.buffers[layer] = buffer.narrow(0, 0, rows)
        return True

    def join(self, other: PlainStore, mine: Sequence[int], theirs: Sequence[int]) -> None:
        """By copying, into new buffers of as much room as the longer of both has unless memory is taken once."""
        old, held = len(mine), max(theirs)
        rows = slice(old, old + len(theirs))
        if not self.room.is_fixed:
            self._places = self._mover = None  # or they would keep the old ones
            longest = max(held, *mine) if mine else held
            self.reserve((), (), longest)
        for layer, given in enumerate(other.buffers):
            if not self.room.is_fixed:
                shape = (rows.stop, self.room.positions, *given.shape[2:])
                whole = self._take(shape, given.dtype, given.device)
                if layer == len(self.buffers):
                    self.buffers.append(whole)
                elif old:
                    whole[:old].copy_(self.buffers[layer][:old])
                self.buffers[layer] = whole
            self.buffers[layer][rows, :held] = given[: len(theirs), :held]

    def copy_rows(self, index: Sequence[int], first: int, held: int) -> None:
        """Let rows become what others are from position `first` on: what lies before it is the same already."""
        moved = [row for row, source in enumerate(index) if row != source]
        if not moved or first >= held:
            return
        if (mover := self._find_mover(len(moved))) is not None:
            mover.move([index[row] for row in moved], moved, first, held)
            return
        sent: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}
        for buffer in self.buffers:
            if buffer.device not in sent:
                sent[buffer.device] = (send(moved, buffer.device), send([index[row] for row in moved], buffer.device))
            into, source = sent[buffer.device]
            part = buffer.narrow(1, first, held - first)
            part.index_copy_(0, into, part.index_select(0, source))  # gathered before it is written

    def can_follow(self, rows: int) -> bool:
        """Whether `follow` moves so many rows by one kernel."""
        return bool(self.buffers) and self._find_mover(rows) is not None

    def follow(self, index: torch.Tensor, held: int) -> None:
        """Let every row become what the row `index[row]`, on the device, is in its first `held` positions."""
        if (mover := self._find_mover(len(index))) is not None:
            mover.follow(index, held)
            return
        for buffer in self.buffers:
            part = buffer.narrow(1, 0, held)[: len(index)]
            part.copy_(part.index_select(0, index.to(buffer.device)))

    def _find_mover(self, num_moved: int) -> RowMover | None:
        """What moves rows in all layers by one kernel; None if there is none for so many, or buffers are not alike."""
        first = self.buffers[0]
        if not first.is_cuda or not has_triton():
            return None
        from unspool.kernels.gpu.attention.row_copies import MOST_ROWS, RowMover  # Triton is imported where needed

        places = self.places()
        if self._mover is not None and self._mover[0] is places:  # looked at before
            return self._mover[1] if num_moved <= MOST_ROWS else None
        is_alike = all(buffer.is_cuda and buffer.stride() == first.stride() for buffer in self.buffers)
        if places is None or num_moved > MOST_ROWS or not is_alike or not first[0].is_contiguous():
            return None
        self._mover = (places, RowMover(places.buffers))
        return self._mover[1]

    def take_rows(self, index: Sequence[int]) -> Self:
        """Some rows in memory of their own, with as much room."""
        made, rows = self._like(), list(index)
        for buffer in self.buffers:
            chosen = made._take((len(rows), *buffer.shape[1:]), buffer.dtype, buffer.device)
            made.buffers.append(chosen.copy_(buffer[rows]))
        return made

    def clone(self) -> Self:
        made = self._like()
        for buffer in self.buffers:
            made.buffers.append(made._take(tuple(buffer.shape), buffer.dtype, buffer.device).copy_(buffer))
        return made

    def _like(self) -> Self:
        """A store of the same room without layers."""
        return type(self)(Room(self.room.positions, self.room.rows, self.room.take))

    def take_part(self, first: int, step: int, rows: int) -> PlainStore:
        """A store over every `step`-th row, which writes into this one's buffers."""
        part = PlainStore(Room(self.room.positions, self.room.rows, self.room.take))
        part.buffers = [buffer[first:rows:step] for buffer in self.buffers]
        return part

    # --- candidates after every row ------------------------------------------------------------------
    def write_forks(
        self, layer: int, kv: torch.Tensor, place: int | None, find_slots: Callable[[], torch.Tensor], stop: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = kv.shape[0]
        buffer = self.rows_of(layer, rows)
        if place is not None:
            buffer.narrow(1, place, kv.shape[1]).copy_(kv)
        else:
            buffer.index_put_((torch.arange(rows, device=kv.device)[:, None], find_slots()), kv)
        return split(buffer.narrow(1, 0, stop))

    def keep_forks(self, chosen: torch.Tensor, lengths: Sequence[int]) -> None:
        if chosen.is_cuda and (keeper := self._find_keeper()) is not None:
            keeper.keep(chosen, list(lengths))
            return
        sent: dict[torch.device, tuple[torch.Tensor, ...]] = {}  # made once: a copy to the device makes the host wait
        for layer, buffer in enumerate(self.buffers):
            if buffer.device not in sent:
                sent[buffer.device] = _find_forks(chosen.to(buffer.device), lengths)
            rows, ends, forks = sent[buffer.device]
            held = self.rows_of(layer, len(lengths))
            held.index_put_((rows, ends), held[rows, forks])

    def _find_keeper(self) -> ForkKeeper | None:
        """What moves forks in all layers by one kernel; None if there is no Triton, or buffers are not alike."""
        places, first = self.places(), self.buffers[0]
        if places is None or not has_triton() or not first.is_contiguous():
            return None
        if any(buffer.stride() != first.stride() for buffer in self.buffers):
            return None
        if self._keeper is None or self._keeper[0] is not places:
            from unspool.kernels.gpu.attention.forks import ForkKeeper  # Triton is imported where a GPU is used

            self._keeper = (places, ForkKeeper(places.buffers))
        return self._keeper[1]

    # --- memory --------------------------------------------------------------------------------------
    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers)

    def held(self) -> list[torch.Tensor]:
        return self.buffers

    def places(self) -> Places | None:
        known = self._places
        if known is None or len(known.buffers) != len(self.buffers) or not all(map(is_, known.buffers, self.buffers)):
            self._places = known = self._make_places()
        return known

    def _make_places(self) -> Places:
        return Places(list(self.buffers))

    def read(self, layer: int, rows: int, length: int) -> torch.Tensor:
        return self.rows_of(layer, rows).narrow(1, 0, length)

    def fill(self, layer: int, held: torch.Tensor) -> None:
        """Take in what a file has of a layer (rows, positions, 2, heads, width)."""
        self.add_layer(layer, held.shape[0], KeyFormat.of(held))
        self.buffers[layer][: held.shape[0], : held.shape[1]] = held

    def take_over(self, buffers: list[torch.Tensor]) -> None:
        """Use these buffers, whose rows and positions are what there is room for until it grows."""
        self.buffers, self.room.positions = buffers, buffers[0].shape[1]

    def pack(self, rows: int, length: int) -> list[torch.Tensor]:
        """What a file has of every layer."""
        return [self.rows_of(layer, rows)[:, : min(length, self.room.positions)] for layer in range(self.num_layers)]

    def clear(self) -> None:
        """Forget everything and keep the memory."""
        for buffer in self.buffers:
            buffer.zero_()


def put(buffer: torch.Tensor, span: Span, kv: torch.Tensor) -> torch.Tensor:
    """Write a pass at its positions; return all that is in view then (rows, stop, 2, heads, width)."""
    if span.is_uniform:
        buffer.narrow(1, span.starts[0], span.num_new).copy_(kv)
    else:
        rows = torch.arange(kv.shape[0], device=kv.device)
        buffer.index_put_((rows[:, None], span.positions), kv)
    return buffer.narrow(1, 0, span.stop)


def _find_forks(chosen: torch.Tensor, lengths: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The rows' numbers, their ends, and where their chosen forks lie: (rows,) each."""
    rows, device = len(lengths), chosen.device
    if min(lengths) == max(lengths):
        ends = torch.full((rows,), lengths[0], device=device)
    else:
        ends = torch.tensor(lengths, device=device)
    return torch.arange(rows, device=device), ends, ends + chosen
