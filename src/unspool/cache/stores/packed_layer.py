"""One layer's keys and values in few bits: whole blocks are packed, what is newer stays as it came."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch

from unspool.cache.span import Span
from unspool.cache.stores.memory import Allocate
from unspool.kernels.packed_keys import PackedKeys, PackedView
from unspool.kernels.packing import Fit, Packed, Scheme, pack, unpack

_TOGETHER = 256  # rows of all layers that are packed by one call
_PIECE = 4096  # positions packed at a time: packing needs room for them in float32


class PackedRun(NamedTuple):
    """Positions of a row that are packed together."""

    source: int  # the slot of the first
    place: int  # where it goes among packed positions
    length: int


@dataclass(slots=True)
class Pending:
    """What a long pass brought: packed past what is held already, and in force only when the pass ends."""

    num_packed: list[int]
    recent: torch.Tensor  # (rows, positions, 2, heads, width)


class LayerBlocks:
    """Packed blocks at the indices of their positions, and after each row's last one its recent positions."""

    def __init__(
        self,
        schemes: tuple[Scheme, Scheme],
        fit: Fit,
        residual_length: int,
        num_places: int,
        recent: torch.Tensor,  # (rows, slots, 2, heads, width): empty
        take: Allocate,  # takes the memory of packed blocks
    ) -> None:
        rows, _, _, heads, _ = recent.shape
        self.keys, self.values = (
            Packed(scheme, *(take(*each, recent.device) for each in scheme.shapes_of(rows, heads, num_places)))
            for scheme in schemes
        )
        self.recent = recent
        self.num_packed = [0] * rows
        self.bases = [0] * rows  # the position that index 0 stands for, one per row: not 0 if a window slid
        self.fit, self._take = fit, take
        self._residual_length = residual_length
        self._pending: Pending | None = None

    @property
    def block(self) -> int:
        """Positions that are packed together."""
        return self.keys.scheme.block

    @property
    def first_recent(self) -> list[int]:
        """The first position that is not packed, one per row."""
        return [base + packed for base, packed in zip(self.bases, self.num_packed, strict=True)]

    @property
    def nbytes(self) -> int:
        """Bytes of packed and of recent positions."""
        return self.keys.nbytes + self.values.nbytes + self.recent.nbytes

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All memory: codes, scales and zero points of keys, then of values, then what is recent."""
        return (*self.keys.tensors(), *self.values.tensors(), self.recent)

    def restart(self, rows: int) -> None:
        """Forget everything; go on with so many rows."""
        self.num_packed, self.bases = [0] * rows, [0] * rows

    # --- a pass --------------------------------------------------------------------------------------
    def reserve(self, num_places: int, num_slots: int) -> None:
        """Make room for so many packed positions and so many recent ones."""
        if num_places > self.keys.num_positions:
            self.keys, self.values = (_grow(packed, num_places) for packed in (self.keys, self.values))
        if num_slots > self.recent.shape[1]:
            self.recent = _grow_axis(self.recent, 1, num_slots)

    def write(self, span: Span, kv: torch.Tensor, columns: torch.Tensor | None = None) -> torch.Tensor:
        """Store a pass's keys and values; return all that is not packed: (rows, slots, 2, heads, width).

        With `columns` (rows, new), the slots they go to, nothing depends on numbers that only the host knows.
        """
        rows = kv.shape[0]
        if columns is not None:
            recent = self.recent[:rows]
            recent.index_put_((torch.arange(rows, device=kv.device)[:, None], columns), kv)
            return recent
        slots = [start - held for start, held in zip(span.starts, self.num_packed, strict=True)]
        needed = max(slots) + span.num_new
        if needed <= self.recent.shape[1]:
            recent = self.recent[:rows]
            _put(recent, slots, span, kv)
            return recent[:, :needed]
        if max(slots) == 0 and kv.is_contiguous():
            seen = kv
        else:
            seen = kv.new_zeros(rows, needed, *kv.shape[2:])
            seen[:, : max(slots)] = self.recent[:rows, : max(slots)]
            _put(seen, slots, span, kv)
        lengths = [start + count for start, count in zip(span.starts, span.counts, strict=True)]
        targets = self.find_targets(lengths)
        longest = max(length - target for length, target in zip(lengths, targets, strict=True))
        tail = kv.new_zeros(rows, longest, *kv.shape[2:])
        for row, (held, target, length) in enumerate(zip(self.num_packed, targets, lengths, strict=True)):
            tail[row, : length - target] = seen[row, target - held : length - held]
        self._pending = self._pack_ahead(seen, lengths, targets, tail)
        return seen

    def _pack_ahead(
        self,
        seen: torch.Tensor,
        lengths: Sequence[int],  # windows let go what is too far back
        targets: list[int],
        tail: torch.Tensor,
    ) -> Pending:
        """Pack what a long pass brought, beside what its queries still read."""
        self._pack(seen, self.find_runs(targets), (self.keys, self.values))
        return Pending(targets, tail)

    def settle(self, lengths: Sequence[int]) -> None:
        """End a pass: take over what it left pending, and pack the blocks that are no longer recent."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self.recent[: pending.recent.shape[0], : pending.recent.shape[1]] = pending.recent
            self.num_packed = pending.num_packed
        pack_recent([self], lengths)

    def is_overdue(self, lengths: Sequence[int]) -> bool:
        """Whether there are blocks to pack that are no longer recent, or a long pass left some pending."""
        return self._pending is not None or self.find_targets(lengths) != self.num_packed

    def count_steps(self, lengths: Sequence[int]) -> int:
        """Steps from rows of these lengths on until there is a block to pack; what is overdue is packed before."""
        targets = self.find_targets(lengths)
        ends = (target + self.block + self._residual_length for target in targets)
        return min(end - length for end, length in zip(ends, lengths, strict=True))

    def forget_pass(self) -> None:
        """Drop what a pass that did not end left pending."""
        self._pending = None

    def find_targets(self, lengths: Sequence[int]) -> list[int]:
        """How many positions of rows of these lengths are to be packed."""
        block = self.block
        return [
            max(held, (length - self._residual_length) // block * block)
            for held, length in zip(self.num_packed, lengths, strict=True)
        ]

    def find_runs(self, targets: Sequence[int]) -> list[PackedRun]:
        """From what each row has packed up to its target; slots begin at the former."""
        return [PackedRun(0, held, target - held) for held, target in zip(self.num_packed, targets, strict=True)]

    def _pack(self, recent: torch.Tensor, runs: Sequence[PackedRun], into: tuple[Packed, Packed]) -> None:
        """Pack a run of each row's slots (rows, slots, 2, heads, width)."""
        piece = max(self.block, _PIECE // self.block * self.block)
        for run, index in _find_alike(runs):
            for start in range(0, run.length, piece):
                length = min(piece, run.length - start)
                both = recent[index, run.source + start : run.source + start + length].unbind(2)
                for packed, numbers in zip(into, both, strict=True):
                    made = pack(numbers.transpose(1, 2), packed.scheme, self.fit)
                    room = packed.narrow(run.place + start, length)
                    for old, new in zip(room.tensors(), made.tensors(), strict=True):
                        old[index] = new

    # --- reading -------------------------------------------------------------------------------------
    def show(self, recent: torch.Tensor, view: PackedView) -> tuple[PackedKeys, PackedKeys]:
        """Keys and values as attention reads them."""
        rows = recent.shape[0]
        keys, values = (part.transpose(1, 2) for part in recent.unbind(2))
        packed = (self.keys, self.values)
        if self.keys.codes.shape[0] != rows:
            packed = (self.keys.rows(slice(0, rows)), self.values.rows(slice(0, rows)))
        return PackedKeys(packed[0], keys, view), PackedKeys(packed[1], values, view)

    # --- rows ----------------------------------------------------------------------------------------
    def truncate(self, lengths: Sequence[int]) -> None:
        """Roll rows back; if that leads into a packed block, its first positions become recent again."""
        for row, length in enumerate(lengths):
            if length >= self.num_packed[row]:
                continue
            first = length // self.block * self.block
            if length > first:
                for which, packed in enumerate((self.keys, self.values)):
                    block = packed.narrow(first, self.block).rows(slice(row, row + 1))
                    numbers = unpack(block, self.recent.dtype)[0].transpose(0, 1)  # (block, heads, width)
                    self.recent[row, : length - first, which] = numbers[: length - first]
            self.num_packed[row] = first

    def select(self, index: Sequence[int], *, is_fixed: bool) -> None:
        """Let row `i` become what row `index[i]` was; buffers of a fixed shape stay where they are."""
        chosen = torch.tensor(list(index), dtype=torch.int64, device=self.recent.device)
        if is_fixed:
            for tensor in self.tensors():
                tensor[: len(index)] = tensor[chosen]
        else:
            self.keys, self.values = self.keys.rows(chosen), self.values.rows(chosen)
            self.recent = self.recent[chosen]
        self.num_packed = [self.num_packed[row] for row in index]
        self.bases = [self.bases[row] for row in index]

    def fill(
        self,
        tensors: Sequence[torch.Tensor],
        num_packed: Sequence[int],
        bases: Sequence[int],
        lengths: Sequence[int],
    ) -> None:
        """Take over what was saved; a ValueError says what does not belong together."""
        for mine, theirs in zip(self.tensors(), tensors, strict=True):
            if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
                raise ValueError(
                    f"{theirs.dtype} {list(theirs.shape)} stands where {mine.dtype} {list(mine.shape)} must"
                )
            mine.copy_(theirs)
        for packed, base, length in zip(num_packed, bases, lengths, strict=True):
            is_sound = all(isinstance(each, int) and each >= 0 and each % self.block == 0 for each in (packed, base))
            if not is_sound or not 0 <= length - base - packed <= self.recent.shape[1]:
                raise ValueError(f"{packed} of {length} positions from {base} can't be packed")
            if packed > self.keys.num_positions:
                raise ValueError(f"{packed} packed positions do not fit {self.keys.num_positions}")
        self.num_packed, self.bases = list(num_packed), list(bases)

    def take_rows(self, index: Sequence[int]) -> Self:
        """Some rows, in memory of their own."""
        part = copy(self)
        part._pending = None
        part.select(index, is_fixed=False)
        return part

    def clone(self, take_recent: Allocate) -> Self:
        """A layer that holds the same, in memory of the same kinds."""
        made = copy(self)
        made._pending = None
        made.keys, made.values = (
            Packed(packed.scheme, *(_copy(tensor, self._take) for tensor in packed.tensors()))
            for packed in (self.keys, self.values)
        )
        made.recent = _copy(self.recent, take_recent)
        made.num_packed, made.bases = list(self.num_packed), list(self.bases)
        return made

    def join(self, other: LayerBlocks, held: int, rows: int) -> None:
        """Take in another's first rows, after its own `held` ones; there is room for as many positions as it has."""
        self._take_room(held + rows)
        packed, recent = max(other.num_packed, default=0), min(other.recent.shape[1], self.recent.shape[1])
        for mine, theirs in ((self.keys, other.keys), (self.values, other.values)):
            room, given = mine.narrow(0, packed), theirs.narrow(0, packed)
            for into, source in zip(room.tensors(), given.tensors(), strict=True):
                into[held : held + rows] = source[:rows]
        self.recent[held : held + rows, :recent] = other.recent[:rows, :recent]
        self.num_packed = [*self.num_packed[:held], *other.num_packed[:rows]]
        self.bases = [*self.bases[:held], *other.bases[:rows]]

    def _take_room(self, rows: int) -> None:
        """Have memory for so many rows, and keep what there is."""
        if rows > self.recent.shape[0]:
            self.keys, self.values = (
                Packed(packed.scheme, *(_grow_axis(tensor, 0, rows) for tensor in packed.tensors()))
                for packed in (self.keys, self.values)
            )
            self.recent = _grow_axis(self.recent, 0, rows)


def pack_recent(layers: Sequence[LayerBlocks], lengths: Sequence[int]) -> None:
    """Pack what is no longer recent in layers that are alike and have nothing pending, many of them by one call."""
    first = layers[0]
    targets = first.find_targets(lengths)
    if targets == first.num_packed:
        return
    most = max(1, _TOGETHER // max(1, len(lengths)))
    for run, index in _find_alike(first.find_runs(targets)):
        for start in range(0, len(layers), most):
            _pack_run(layers[start : start + most], run, index)
    for layer in layers:
        layer.num_packed = list(targets)


def _pack_run(layers: Sequence[LayerBlocks], run: PackedRun, index: slice | torch.Tensor) -> None:
    """Pack one run of some rows' slots in all layers, and move up what follows it."""
    stop = run.source + run.length
    recent = torch.stack([layer.recent[index] for layer in layers])  # (layers, rows, slots, 2, heads, width)
    for which, packed in enumerate(([layer.keys for layer in layers], [layer.values for layer in layers])):
        numbers = recent[:, :, run.source : stop, which].flatten(0, 1).transpose(1, 2)
        made = pack(numbers, packed[0].scheme, layers[0].fit)  # (layers * rows, heads, positions, …)
        rooms = [each.narrow(run.place, run.length).tensors() for each in packed]
        for place, new in enumerate(made.tensors()):
            _copy_layers([room[place] for room in rooms], index, new.view(len(layers), -1, *new.shape[1:]))
    _copy_layers([layer.recent[:, : recent.shape[2] - stop] for layer in layers], index, recent[:, :, stop:])


def _copy_layers(into: Sequence[torch.Tensor], index: slice | torch.Tensor, made: torch.Tensor) -> None:
    """Put what was made for all layers (layers, rows, …) into the rows of each layer's own tensor."""
    if isinstance(index, slice):
        torch._foreach_copy_([each[index] for each in into], list(made.unbind(0)))
        return
    for each, new in zip(into, made, strict=True):
        each[index] = new


def _find_alike(runs: Sequence[PackedRun]) -> list[tuple[PackedRun, slice | torch.Tensor]]:
    """The runs that there are, and the rows that have each."""
    alike: dict[PackedRun, list[int]] = defaultdict(list)
    for row, run in enumerate(runs):
        if run.length > 0:
            alike[run].append(row)
    return [
        (run, slice(rows[0], rows[-1] + 1) if rows == list(range(rows[0], rows[-1] + 1)) else torch.tensor(rows))
        for run, rows in alike.items()
    ]


def _put(recent: torch.Tensor, slots: Sequence[int], span: Span, kv: torch.Tensor) -> None:
    if len(set(slots)) == 1:
        recent.narrow(1, slots[0], span.num_new).copy_(kv)
        return
    rows = torch.arange(kv.shape[0], device=kv.device)[:, None]
    columns = torch.tensor(slots, device=kv.device)[:, None] + torch.arange(span.num_new, device=kv.device)
    recent.index_put_((rows, columns), kv.to(recent.dtype))


def _copy(tensor: torch.Tensor, take: Allocate) -> torch.Tensor:
    return take(tuple(tensor.shape), tensor.dtype, tensor.device).copy_(tensor)


def _grow(packed: Packed, num_places: int) -> Packed:
    codes = _grow_axis(packed.codes, 2, num_places)
    num_scales = packed.scheme.scales_of(num_places)[0]
    return Packed(packed.scheme, codes, *(_grow_axis(each, 2, num_scales) for each in (packed.scale, packed.zero)))


def _grow_axis(tensor: torch.Tensor, axis: int, size: int) -> torch.Tensor:
    shape = list(tensor.shape)
    shape[axis] = size
    grown = tensor.new_zeros(shape)
    grown.narrow(axis, 0, tensor.shape[axis]).copy_(tensor)
    return grown
