"""What dynamic and static caches share: one buffer a layer, keys and values side by side."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from operator import is_
from typing import TYPE_CHECKING, Any

import torch

from unspool.cache.base import DIVIDE, FLAT, FORK, Cache
from unspool.cache.places import Places
from unspool.cache.span import Span
from unspool.cache.stores.layout import split
from unspool.cache.views.forked import BufferedFork
from unspool.errors import SettingError
from unspool.kernels.presence import has_triton
from unspool.kernels.ragged import Ragged
from unspool.kernels.sending import send

if TYPE_CHECKING:
    from unspool.kernels.gpu.attention.forks import ForkKeeper


class BufferedCache(Cache):
    """A cache of plain tensors (rows, capacity, 2, heads, width), a layer each.

    Keys and values of one position lie side by side, so that the fused QKV product of a native model is
    stored by one copy.
    """

    def __init__(self) -> None:
        super().__init__()
        self._buffers: list[torch.Tensor] = []
        self._keeper: tuple[Places, ForkKeeper] | None = None  # for as long as the places are these
        self._places: Places | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_places": None}  # addresses are not a copy's

    # --- a forward pass ------------------------------------------------------------------------------
    def write(self, layer: int, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._store(layer, self._require_span(), kv)

    def _store(self, layer: int, span: Span, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if layer >= len(self._buffers):
            self._add_layer(layer, kv.shape[0], kv.shape[3], kv.shape[4], kv.dtype, kv.device)
        buffer = self.rows_of(layer)
        if span.is_uniform:
            buffer.narrow(1, span.starts[0], span.num_new).copy_(kv)
        else:
            rows = torch.arange(kv.shape[0], device=kv.device)
            buffer.index_put_((rows[:, None], span.positions), kv)
        return split(buffer.narrow(1, 0, span.stop))

    def write_flat(self, layer: int, kv: torch.Tensor, ragged: Ragged) -> tuple[torch.Tensor, torch.Tensor]:
        self.require(FLAT)
        span = self._require_span()
        if layer >= len(self._buffers):
            self._add_layer(layer, len(span.starts), kv.shape[2], kv.shape[3], kv.dtype, kv.device)
        buffer = self.rows_of(layer)
        buffer.index_put_((ragged.rows, ragged.positions), kv)
        keys, values = buffer.unbind(2)
        return keys, values

    def rows_of(self, layer: int) -> torch.Tensor:
        """A layer's buffer, without rows that are kept for later (a static cache may have some)."""
        buffer, rows = self._buffers[layer], len(self.lengths)
        return buffer if buffer.shape[0] == rows else buffer.narrow(0, 0, rows)

    # --- a captured step -----------------------------------------------------------------------------
    def places(self, *, in_order: bool = False) -> Places | None:  # noqa: ARG002 - they always are
        if type(self).write is not BufferedCache.write:
            return None  # a kind that stores in a way of its own
        return self._find_places()

    def _find_places(self) -> Places:
        known = self._places
        if known is None or len(known.buffers) != len(self._buffers) or not all(map(is_, known.buffers, self._buffers)):
            self._places = known = self._make_places()
        return known

    def _make_places(self) -> Places:
        return Places(list(self._buffers))

    def _select(self, index: torch.Tensor) -> None:
        held = max(self.lengths, default=0)
        self._places = None  # or it would keep the old ones
        grows = len(index) > len(self.lengths)
        grown: list[torch.Tensor] = []
        for layer, buffer in enumerate(self._buffers):
            rows = index.to(buffer.device)
            chosen = self._take((len(index), *buffer.shape[1:]), buffer.dtype, buffer.device)
            torch.index_select(buffer.narrow(1, 0, held), 0, rows, out=chosen.narrow(1, 0, held))
            if grows:  # all layers or none, should memory run out: layers must not differ in their rows
                grown.append(chosen)
            else:
                self._buffers[layer] = chosen
        self._buffers = grown if grows else self._buffers

    def open_layers(self, num_layers: int, rows: int, heads: int, width: int, dtype: torch.dtype) -> None:
        for layer in range(len(self._buffers), num_layers):
            self._add_layer(layer, rows, heads, width, dtype, torch.device("cpu"))

    def _join(self, other: BufferedCache) -> None:
        """By copying: both parts' rows lie in new buffers of as much room as the longer of them has."""
        mine, theirs = len(self.lengths), len(other.lengths)
        self._places = None  # or it would keep the old ones
        self._reserve(max(max(self.lengths, default=0), max(other.lengths)))
        for layer, given in enumerate(other._buffers):
            held = max(other.lengths)
            whole = self._take((mine + theirs, self._capacity(), *given.shape[2:]), given.dtype, given.device)
            if layer == len(self._buffers):
                self._buffers.append(whole)
            elif mine:
                whole[:mine].copy_(self._buffers[layer][:mine])
            self._buffers[layer] = whole
            whole[mine:, :held].copy_(given[:theirs, :held])

    def copy_rows(self, index: Sequence[int], first: int) -> None:
        """Let rows become what others are from position `first` on: what lies before it is the same already."""
        if not self.lengths:
            return  # nothing is held yet
        moved = [row for row, source in enumerate(index) if row != source]
        held = max(self.lengths, default=0)
        if moved and first < held:
            told: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}
            for buffer in self._buffers:
                if buffer.device not in told:
                    told[buffer.device] = (
                        send(moved, buffer.device),
                        send([index[row] for row in moved], buffer.device),
                    )
                into, source = told[buffer.device]
                part = buffer.narrow(1, first, held - first)
                part.index_copy_(0, into, part.index_select(0, source))  # gathered before it is written
        self.lengths = [self.lengths[row] for row in index]

    def fork(self, forks: range) -> Cache:
        self.require(FORK)
        return BufferedFork(self, forks, self)

    def keep_fork(self, chosen: torch.Tensor) -> None:
        self.require(FORK)
        if chosen.is_cuda and (keeper := self._find_keeper()) is not None:
            keeper.keep(chosen, self.lengths)
            self.lengths = [length + 1 for length in self.lengths]
            return
        places: dict[torch.device, tuple[torch.Tensor, ...]] = {}  # made once: a copy to the device makes the host wait
        for layer, buffer in enumerate(self._buffers):
            if buffer.device not in places:
                places[buffer.device] = self._find_forks(chosen.to(buffer.device))
            rows, ends, forks = places[buffer.device]
            held = self.rows_of(layer)
            held.index_put_((rows, ends), held[rows, forks])
        self.lengths = [length + 1 for length in self.lengths]

    def _find_keeper(self) -> ForkKeeper | None:
        """What moves forks in all layers by one kernel; None where there is no Triton, or buffers are not alike."""
        places, first = self.places(), self._buffers[0]
        if places is None or not has_triton() or not first.is_contiguous():
            return None
        if any(buffer.stride() != first.stride() for buffer in self._buffers):
            return None
        if self._keeper is None or self._keeper[0] is not places:
            from unspool.kernels.gpu.attention.forks import ForkKeeper  # Triton is imported where a GPU is used

            self._keeper = (places, ForkKeeper(places.buffers))
        return self._keeper[1]

    def _find_forks(self, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The rows' numbers, their ends, and where their chosen forks lie: (rows,) each."""
        rows, device = len(self.lengths), chosen.device
        if min(self.lengths) == max(self.lengths):
            ends = torch.full((rows,), self.lengths[0], device=device)
        else:
            ends = torch.tensor(self.lengths, device=device)
        return torch.arange(rows, device=device), ends, ends + chosen

    def divide(self, num_parts: int, num_new: int) -> list[Cache]:
        self.require(DIVIDE)
        rows, held = len(self.lengths), max(self.lengths, default=0)
        self._reserve(held + num_new)  # here: a part that grew would write into buffers of its own
        parts: list[Cache] = []
        for first in range(num_parts):
            part = copy(self)
            part.lengths = self.lengths[first::num_parts]
            part._buffers = [buffer[first:rows:num_parts] for buffer in self._buffers]
            parts.append(part)
        return parts

    @property
    def nbytes(self) -> int:
        """Bytes that the buffers take."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def _add_layer(
        self, layer: int, rows: int, heads: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        if layer != len(self._buffers):
            raise SettingError(f"layer {layer} is written before layer {len(self._buffers)}")
        self._buffers.append(self._take((rows, self._capacity(), 2, heads, width), dtype, device))

    def _take(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for a layer: zeros, for what lies past a short row's end is masked, and NaN can't be."""
        return torch.zeros(shape, dtype=dtype, device=device)

    def _capacity(self) -> int:
        raise NotImplementedError

    # --- copies and files ----------------------------------------------------------------------------
    def _held_tensors(self) -> list[torch.Tensor]:
        return self._buffers

    def _pack(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        held = max(self.lengths, default=0)
        tensors = {f"layer.{layer}": self.rows_of(layer)[:, :held] for layer in range(len(self._buffers))}
        return {"capacity": self._capacity()}, tensors

    def _fill(self, tensors: dict[str, torch.Tensor], lengths: list[int]) -> None:
        """Take in what `_pack` gave, for rows of the given lengths."""
        for layer in range(len(tensors)):
            held = tensors[f"layer.{layer}"]
            if held.dim() != 5 or held.shape[:2] != (len(lengths), max(lengths, default=0)) or held.shape[2] != 2:
                raise ValueError(f"layer {layer} has the shape {list(held.shape)} for rows of {lengths}")
            if layer >= len(self._buffers):
                self._add_layer(layer, len(lengths), held.shape[3], held.shape[4], held.dtype, held.device)
            self._buffers[layer][: held.shape[0], : held.shape[1]] = held
        self.lengths = list(lengths)

    # --- the reference's surface ---------------------------------------------------------------------
    def _append(self, layer: int, span: Span, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if layer < len(self._buffers):
            kv = kv.to(self._buffers[layer].device, self._buffers[layer].dtype)
        return self._store(layer, span, kv)

    def _show(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return split(self.rows_of(layer).narrow(1, 0, self.get_seq_length(layer)))

    def __len__(self) -> int:
        return len(self._buffers)
