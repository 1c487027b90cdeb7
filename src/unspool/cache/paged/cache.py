"""The cache in blocks: a row takes blocks of positions as it grows, and rows share those that they have in common."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from unspool.cache.base import DIVIDE, FIXED_SHAPE, FLAT, FORK, JOIN, RAGGED, ROLL_BACK, SELECT_ROWS, Cache
from unspool.cache.files import saved
from unspool.cache.paged.block_index import BlockIndex
from unspool.cache.paged.block_table import BlockTable
from unspool.cache.paged.fork import PagedFork
from unspool.cache.paged.pool import BLOCK_SIZE, MOST_BLOCKS, BlockPool
from unspool.cache.places import Places
from unspool.cache.span import Span
from unspool.cache.stores.layout import split
from unspool.errors import SettingError
from unspool.kernels.presence import has_triton
from unspool.kernels.ragged import Ragged

if TYPE_CHECKING:
    from unspool.kernels.gpu.attention.forks import ForkKeeper


@dataclass(slots=True)
class _Move:
    """What one pass writes where and reads where, worked out once for all layers."""

    slots: torch.Tensor  # (positions written,): places in all blocks, one block after the other
    real: torch.Tensor | None  # which of (rows * new) are written; None: all
    first: int | None  # where a lone row's blocks, which lie one after the other, begin
    blocks: torch.Tensor | None  # (rows * blocks in view,); None: the new keys are all there are, or `first` says it


@saved
class PagedCache(Cache):
    """A cache whose rows hold blocks of a pool (`BlockPool`): memory for what rows hold, not rows times the longest.

    Selecting, repeating and cloning rows shares blocks; the last one, partly filled, is copied by whoever writes to it
    first. Give several caches one `pool`, and they share what they have in common and what there is. Attention outside
    captured steps reads keys that are gathered in order, layer by layer.
    """

    can = frozenset({ROLL_BACK, SELECT_ROWS, RAGGED, FORK, DIVIDE, FLAT, JOIN})

    def __init__(
        self,
        pool: BlockPool | None = None,
        *,
        block_size: int | None = None,
        num_blocks: int | None = None,
        max_cache_len: int | None = None,
    ) -> None:
        super().__init__()
        if pool is not None and (block_size is not None or num_blocks is not None):
            raise SettingError("a pool has its blocks; leave out block_size and num_blocks, or the pool")
        self.pool = (
            pool if pool is not None else BlockPool(BLOCK_SIZE if block_size is None else block_size, num_blocks)
        )
        if max_cache_len is not None and not 1 <= max_cache_len <= MOST_BLOCKS * self.pool.block_size:
            raise SettingError(f"`max_cache_len` of a paged cache must be a number of positions, not {max_cache_len!r}")
        self.max_cache_len = max_cache_len
        if self.pool.is_fixed:
            self.can = type(self).can | {FIXED_SHAPE}
        self._table = BlockTable(self.pool)
        self._index: BlockIndex | None = None  # the table on a device
        self._told_version = -1  # of the table, that the index was told
        self._move: _Move | None = None
        self._places: Places | None = None
        self._keeper: tuple[Places, ForkKeeper] | None = None  # for as long as the places are these

    # --- a forward pass ------------------------------------------------------------------------------
    def begin(
        self,
        rows: int,
        num_new: int,
        counts: Sequence[int] | None = None,
        device: torch.device | str = "cpu",
    ) -> Span:
        span = super().begin(rows, num_new, counts, device)
        self._move = None
        return span

    def _reserve_rows(self, starts: Sequence[int], stops: Sequence[int], stop: int) -> None:  # noqa: ARG002
        """Blocks for what each row really gets: what a short row has past its end is written nowhere."""
        self._check_room(max(stops))
        self._table.make_room(starts, stops)

    def _open(self, rows: int) -> None:
        self._table.open(rows)

    def _reserve(self, stop: int) -> None:
        self._reserve_rows(self.lengths, [stop] * len(self.lengths), stop)

    def _check_room(self, stop: int) -> None:
        if self.max_cache_len is not None and stop > self.max_cache_len:
            raise SettingError(
                f"position {stop} does not fit a paged cache of {self.max_cache_len} positions a row; make it larger "
                "(max_cache_len), or leave it out, and rows grow while there are blocks"
            )

    def write(self, layer: int, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        span = self._require_span()
        with self.pool.lock:
            buffer = self._open_layer(layer, kv)
            if self._move is None:
                self._move = self._plan_move(span, kv.device)
            move = self._move
            new = kv.reshape(-1, *kv.shape[2:])
            if move.real is not None:
                new = new.index_select(0, move.real)
            buffer.flatten(0, 1).index_copy_(0, move.slots, new)
            if move.first is None and move.blocks is None:  # nothing was held before: what is new is all there is
                return split(kv)
            return split(self._view(buffer, move, len(span.starts), span.stop))

    def write_flat(self, layer: int, kv: torch.Tensor, ragged: Ragged) -> tuple[torch.Tensor, torch.Tensor]:
        span = self._require_span()
        with self.pool.lock:
            buffer = self._open_layer(layer, kv)
            if self._move is None:
                index = self._tell_index(kv.device, self.pool.count_blocks(span.stop))
                slots = index.find_flat_slots(ragged.rows, ragged.positions, self.pool.block_size)
                self._move = self._plan_view(slots, None, span.stop, kv.device)
            buffer.flatten(0, 1).index_copy_(0, self._move.slots, kv)
            keys, values = self._view(buffer, self._move, len(span.starts), span.stop).unbind(2)
            return keys, values

    def _open_layer(self, layer: int, kv: torch.Tensor) -> torch.Tensor:
        if layer < len(self.pool.buffers):
            return self.pool.buffers[layer]
        return self.pool.open_layer(layer, kv.shape[-2], kv.shape[-1], kv.dtype, kv.device)

    def _plan_move(self, span: Span, device: torch.device) -> _Move:
        index = self._tell_index(device, self.pool.count_blocks(span.stop))
        slots, real = index.find_slots(span.positions, self.pool.block_size).flatten(), None
        if min(span.counts) < span.num_new:
            is_real = torch.arange(span.num_new) < torch.tensor(span.counts)[:, None]  # (rows, new)
            real = is_real.flatten().nonzero()[:, 0].to(device)
            slots = slots[real]
        if max(span.starts) == 0:
            return _Move(slots, real, None, None)
        return self._plan_view(slots, real, span.stop, device)

    def _plan_view(self, slots: torch.Tensor, real: torch.Tensor | None, stop: int, device: torch.device) -> _Move:
        """How the first `stop` positions of every row are read: in one piece, where a lone row's blocks allow it."""
        rows, num_blocks = self._table.rows, self.pool.count_blocks(stop)
        if len(rows) == 1 and len(rows[0]) >= num_blocks:
            first = rows[0][0]
            if rows[0][:num_blocks] == list(range(first, first + num_blocks)):
                return _Move(slots, real, first, None)
        return _Move(slots, real, None, self._tell_index(device, num_blocks).find_blocks(len(rows), num_blocks))

    def _view(self, buffer: torch.Tensor, move: _Move, rows: int, stop: int) -> torch.Tensor:
        """Keys and values in order: (rows, stop, 2, heads, width); a row has zeros where it holds nothing."""
        if move.first is not None:
            return buffer[move.first : move.first + self.pool.count_blocks(stop)].flatten(0, 1)[None, :stop]
        assert move.blocks is not None
        return buffer.index_select(0, move.blocks).view(rows, -1, *buffer.shape[2:])[:, :stop]

    def _tell_index(self, device: torch.device, num_blocks: int = 0) -> BlockIndex:
        """The table on a device, as it is now, with room for so many blocks a row."""
        index = self._index
        if index is None or index.device != device:
            self._index = index = BlockIndex(device)
        elif self._told_version == self._table.version and num_blocks <= index.table.shape[1]:
            return index
        index.tell(self._table.rows, num_blocks)
        self._told_version = self._table.version
        return index

    def end(self) -> None:
        super().end()
        self._move = None

    def holds_buffers(self, num_layers: int) -> bool:
        return len(self.pool.buffers) == num_layers

    # --- a captured step -----------------------------------------------------------------------------
    def steady(self) -> AbstractContextManager[Any]:
        return self.pool.lock

    def places(self, *, in_order: bool = False) -> Places | None:  # noqa: ARG002 - they always are
        if not self.pool.buffers or not self.lengths:
            return Places([])
        table = self._tell_index(self.pool.buffers[0].device).table
        known = self._places
        is_known = known is not None and known.block_table is table and len(known.buffers) == len(self.pool.buffers)
        if known is None or not is_known or known.buffers[-1] is not self.pool.buffers[-1]:
            self._places = known = self.pool.show(table)
        return known

    def open_layers(self, num_layers: int, rows: int, heads: int, width: int, dtype: torch.dtype) -> None:  # noqa: ARG002
        for layer in range(len(self.pool.buffers), num_layers):
            self.pool.open_layer(layer, heads, width, dtype, torch.device("cpu"))

    def make_room(self, rows: int, num_new: int) -> None:
        if len(self.lengths) == rows:
            stops = [start + num_new for start in self.lengths]
            self._reserve_rows(self.lengths, stops, max(stops))

    @property
    def longest_stretch(self) -> int | None:
        """Within what rows hold already, where there may not be a block more for each of them."""
        if not self.lengths:
            return 0
        room = None if self.max_cache_len is None else self.max_cache_len - max(self.lengths, default=0)
        if self.pool.is_fixed and self.pool.num_free < 2 * len(self.lengths):
            size = self.pool.block_size
            room = min(len(row) * size - length for row, length in zip(self._table.rows, self.lengths, strict=True))
        return room if room is None else max(1, room)

    # --- rows ----------------------------------------------------------------------------------------
    def truncate(self, lengths: Sequence[int]) -> None:
        super().truncate(lengths)
        self._table.cut(self.lengths)

    def _select(self, index: torch.Tensor) -> None:
        self._table.select(index.tolist())

    def _join(self, other: PagedCache) -> None:
        """Blocks of one pool are counted for both; those of another are copied."""
        self._check_room(max(other.lengths))
        if not self.lengths:
            self._table.open(0)
        self._table.join(other._table, other.lengths)

    def fork(self, forks: range) -> Cache:
        return PagedFork(self, forks, self)

    def keep_fork(self, chosen: torch.Tensor) -> None:
        """Move every row's chosen fork to the row's end."""
        if chosen.is_cuda and has_triton() and (places := self.places()) is not None:
            if self._keeper is None or self._keeper[0] is not places:
                from unspool.kernels.gpu.attention.forks import ForkKeeper  # Triton is imported where a GPU is used

                self._keeper = (places, ForkKeeper(places.buffers, places.block_table))
            self._keeper[1].keep(chosen, self.lengths)
        else:
            self._keep_plainly(chosen)
        self.lengths = [length + 1 for length in self.lengths]

    def _keep_plainly(self, chosen: torch.Tensor) -> None:
        ends = torch.tensor(self.lengths, device=chosen.device)[:, None]  # (rows, 1)
        index, size = self._tell_index(chosen.device), self.pool.block_size
        source = index.find_slots(ends + chosen[:, None], size)[:, 0]
        target = index.find_slots(ends, size)[:, 0]
        for buffer in self.pool.buffers:
            places = buffer.flatten(0, 1)
            places[target] = places[source]

    def open_forks(self, count: int) -> None:
        """Make sure that `count` candidates can be written past every row's end."""
        self._move = None
        self._table.make_room(self.lengths, [length + count for length in self.lengths])

    def write_forks(
        self, layer: int, kv: torch.Tensor, positions: torch.Tensor, stop: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store candidates (rows, forks, 2, heads, width) at positions (rows, forks); return the first `stop` keys."""
        with self.pool.lock:
            buffer = self._open_layer(layer, kv)
            if self._move is None:
                slots = self._tell_index(kv.device).find_slots(positions, self.pool.block_size).flatten()
                self._move = self._plan_view(slots, None, stop, kv.device)
            buffer.flatten(0, 1).index_copy_(0, self._move.slots, kv.flatten(0, 1))
            return split(self._view(buffer, self._move, len(self.lengths), stop))

    def close_forks(self) -> None:
        """Forget where candidates were written: rows are written to again."""
        self._move = None

    def divide(self, num_parts: int, num_new: int) -> list[Cache]:  # noqa: ARG002 - a part makes room for itself
        self.require(DIVIDE)
        parts: list[Cache] = []
        for first in range(num_parts):
            part = copy(self)
            part.lengths = self.lengths[first::num_parts]
            # The very lists of this cache: what a part takes or copies, this one has.
            part._table = BlockTable(self.pool, self._table.rows[first::num_parts], owns=False)
            part._index = part._places = part._keeper = None
            parts.append(part)
        return parts

    def rejoin(self, parts: Sequence[Cache]) -> None:
        super().rejoin(parts)
        self._table.version += 1  # the parts may have taken blocks for its rows

    # --- what it takes -------------------------------------------------------------------------------
    @property
    def nbytes(self) -> int:
        """Bytes of the blocks that its rows hold, each once; `pool.nbytes` is what the pool has taken."""
        return len(self._table.find_held()) * self.pool.block_nbytes

    def get_max_cache_shape(self) -> int | None:
        whole = self.pool.max_blocks * self.pool.block_size if self.pool.max_blocks is not None else None
        told = [room for room in (whole, self.max_cache_len) if room is not None]
        return min(told, default=None)

    def _held_tensors(self) -> list[torch.Tensor]:
        return self.pool.buffers

    # --- copies and files ----------------------------------------------------------------------------
    def __deepcopy__(self, memo: dict[int, Any]) -> PagedCache:
        """A clone holds the same blocks: nothing is copied until one of the two writes to a block of both."""
        copied = copy(self)
        memo[id(self)] = copied
        copied.lengths = list(self.lengths)
        copied._table = self._table.clone()
        copied._index = copied._places = copied._keeper = copied._move = None
        return copied

    def _pack(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        held = self._table.find_held()
        number = {block: place for place, block in enumerate(held)}
        facts = {
            "block_size": self.pool.block_size,
            "num_blocks": self.pool.max_blocks,
            "max_cache_len": self.max_cache_len,
            "rows": [
                [number[block] for block in row[: self.pool.count_blocks(length)]]
                for row, length in zip(self._table.rows, self.lengths, strict=True)
            ],
        }
        return facts, {f"layer.{layer}": buffer[held] for layer, buffer in enumerate(self.pool.buffers)}

    @classmethod
    def _unpack(cls, facts: dict[str, Any], tensors: dict[str, torch.Tensor], lengths: list[int]) -> PagedCache:
        names = ("block_size", "num_blocks", "max_cache_len")
        cache = cls(**{name: facts[name] for name in names})
        buffers = [tensors[f"layer.{layer}"] for layer in range(len(tensors))]
        num_held = len(buffers[0]) if buffers else 0
        sizes = {tuple(buffer.shape) for buffer in buffers}
        if len(sizes) > 1 or any(size[1:3] != (cache.pool.block_size, 2) or len(size) != 5 for size in sizes):
            raise ValueError(f"layers of the shapes {sorted(sizes)} are no blocks of {cache.pool.block_size} positions")
        users, rows = [0] * num_held, facts["rows"]
        if [len(row) for row in rows] != [cache.pool.count_blocks(length) for length in lengths]:
            raise ValueError(f"blocks {rows} do not fit rows of {lengths}")
        for row in rows:
            for block in row:
                if not isinstance(block, int) or not 0 <= block < num_held:
                    raise ValueError(f"block {block!r} is none of its {num_held}")
                users[block] += 1
        cache.pool.adopt(buffers, users)
        cache._table.rows = [[1 + block for block in row] for row in rows]
        cache.lengths = list(lengths)
        return cache

    # --- the reference's surface ---------------------------------------------------------------------
    def _append(self, layer: int, span: Span, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with self.pool.lock:
            buffer = self._open_layer(layer, kv)
            slots = self._tell_index(kv.device).find_slots(span.positions, self.pool.block_size).flatten()
            buffer.flatten(0, 1).index_copy_(0, slots, kv.flatten(0, 1))
            return self._gather(layer, span.stop)

    def _show(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        with self.pool.lock:
            return self._gather(layer, self.get_seq_length(layer))

    def _gather(self, layer: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        buffer = self.pool.buffers[layer]
        none = torch.empty(0, dtype=torch.int64, device=buffer.device)
        move = self._plan_view(none, None, stop, buffer.device)
        return split(self._view(buffer, move, len(self.lengths), stop))

    def __len__(self) -> int:
        return len(self.pool.buffers) if self.lengths else 0
