"""Keys and values in few bits, in blocks: what is recent in blocks of plain keys, what is older in packed blocks.

Two pools with one lock: rows take plain blocks as they grow, and a whole one that is no longer recent is packed into a
block of the other pool and given back. Packed blocks are never written again, so rows, clones and calls share them. A
row's plain blocks are counted from its first position that is not packed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from unspool.cache.paged.block_group import BlockGroup
from unspool.cache.paged.block_table import BlockTable, join_tables, reserve_blocks
from unspool.cache.paged.packed_layers import NUM_PARTS, PackedLayers
from unspool.cache.paged.pool import BlockPool
from unspool.cache.paged.pooled import PooledStore, read_rows
from unspool.cache.places import PackedPlaces, Places
from unspool.cache.span import Span
from unspool.cache.stores.memory import KeyFormat, split
from unspool.cache.stores.quantization import QuantizedCacheConfig
from unspool.errors import SettingError
from unspool.kernels.packed_keys import PackedKeys, PackedView
from unspool.kernels.packing import Fit, Packed


@dataclass(slots=True)
class _LongPass:
    """A pass that brings more than stays recent: packed on its way, in force when it ends."""

    targets: list[int]  # positions that are packed then, one count per row
    packed: BlockTable  # the blocks that are new
    recent: BlockTable  # what holds the rest


class PackedBlockStore(PooledStore):
    """Packed blocks, and after each row's last one plain blocks of what is recent."""

    is_trying: bool = False

    def __init__(self, config: QuantizedCacheConfig, fit: Fit, pool: BlockPool, packed_pool: BlockPool) -> None:
        super().__init__(pool)
        self.config, self._fit, self.packed_pool = config, fit, packed_pool
        self._layers = PackedLayers(config, fit, pool, packed_pool)
        self.recent = BlockGroup(pool, None)
        self.packed = BlockTable(packed_pool)
        self.num_packed: list[int] = []  # positions, one count per row
        self._long: _LongPass | None = None
        self._view: PackedView | None = None
        self._near: Span | None = None  # the pass's span, counted from what is not packed

    @property
    def num_layers(self) -> int:
        return len(self.pool.buffers)

    def add_layer(self, layer: int, rows: int, keys: KeyFormat) -> None:  # blocks are for any number
        with self.pool.lock:
            self.pool.open_layer(layer, keys)
            self._layers.open(layer, keys)

    @property
    def tables(self) -> list[BlockTable]:
        return [self.recent.table, self.packed]

    # --- a pass --------------------------------------------------------------------------------------
    def open(self, rows: int) -> None:
        self.recent.table.open(rows)
        self.packed.open(rows)
        self.num_packed = [0] * rows

    def reserve(self, starts: Sequence[int], stops: Sequence[int], stop: int) -> None:
        self._long = None
        self.catch_up(starts)
        held, size = self.num_packed, self.pool.block_size
        targets = held if self.is_trying else self._find_targets(stops)
        missing = sum(target - count for target, count in zip(targets, held, strict=True)) // size
        firsts = [start - count for start, count in zip(starts, held, strict=True)]
        most = self.config.residual_length + 2 * size
        with self.pool.lock:
            self.packed_pool.ensure(missing)  # for what is due when the pass ends
            if missing and max(end - count for end, count in zip(stops, held, strict=True)) > most:
                long = _LongPass(list(targets), BlockTable(self.packed_pool), BlockTable(self.pool))
                none = [0] * len(starts)
                for table, wanted in (
                    (long.recent, [end - target for end, target in zip(stops, targets, strict=True)]),
                    (long.packed, [target - count for target, count in zip(targets, held, strict=True)]),
                ):
                    table.open(len(starts))
                    reserve_blocks([table], none, wanted)
                self._long = long
            else:
                lasts = [end - count for end, count in zip(stops, held, strict=True)]
                reserve_blocks([self.recent.table], firsts, lasts)

    def begin(self, span: Span) -> None:
        self.recent.forget_pass()
        self._view, counts = None, self.num_packed
        starts = [start - count for start, count in zip(span.starts, counts, strict=True)]
        self._near = replace(
            span,
            starts=starts,
            stop=max(starts) + span.num_new,
            is_uniform=len(set(starts)) == 1,
            placed=None if not any(counts) else span.positions - self._send(span.positions.device)[:, None],
        )
        if any(counts):
            sent = self._send(span.positions.device)
            self._view = PackedView(list(counts), sent, span.positions, max(counts))

    def _send(self, device: torch.device) -> torch.Tensor:
        return torch.tensor(self.num_packed, dtype=torch.int32, device=device)

    @property
    def sees_by_position(self) -> bool:
        return self._view is not None

    def write(self, layer: int, span: Span, kv: torch.Tensor) -> tuple[Any, Any]:
        rows, near = len(span.starts), self._near
        assert near is not None
        self._ensure_layer(layer, rows, kv)
        with self.pool.lock:
            buffer = self.pool.buffers[layer]
            if self._long is not None:
                seen = self._see_long(buffer, near, kv)
                self._pack_ahead(layer, self._long, near, seen)
            else:
                seen = self.recent.write(buffer, near, kv)
            return self._show(layer, seen, self._view)

    def _see_long(self, buffer: torch.Tensor, near: Span, kv: torch.Tensor) -> torch.Tensor:
        """All that is not packed, the new keys included: (rows, places, 2, heads, width)."""
        held = max(near.starts)
        if not held:
            return kv
        seen = kv.new_zeros(kv.shape[0], near.stop, *kv.shape[2:])
        seen[:, :held] = self.recent.read(buffer, kv.shape[0], held)
        seen[torch.arange(kv.shape[0], device=kv.device)[:, None], near.positions] = kv
        return seen

    def _pack_ahead(self, layer: int, long: _LongPass, near: Span, seen: torch.Tensor) -> None:
        size, blocks, numbers = self.pool.block_size, [], []
        for row, (target, count) in enumerate(zip(long.targets, self.num_packed, strict=True)):
            first, stop = target - count, near.starts[row] + near.counts[row]
            blocks += long.packed.rows[row]
            numbers.append(seen[row, :first].view(-1, size, *seen.shape[2:]))
            rest, into = seen[row, first:stop], long.recent.rows[row]
            if len(rest):
                whole = torch.cat((rest, rest.new_zeros(len(into) * size - len(rest), *rest.shape[1:])))
                self.pool.buffers[layer][into] = whole.view(-1, size, *seen.shape[2:]).to(
                    self.pool.buffers[layer].dtype
                )
        self._layers.pack(layer, torch.cat(numbers), blocks)

    def _show(self, layer: int, seen: torch.Tensor, view: PackedView | None) -> tuple[Any, Any]:
        """Keys and values as attention reads them: packed blocks gathered in order, then what is recent."""
        if view is None:
            return split(seen)
        rows, num_blocks = seen.shape[0], max(view.num_packed) // self.pool.block_size
        blocks = self.packed.put_on(seen.device, num_blocks).find_blocks(rows, num_blocks)
        both = []
        for packed, recent in zip(self._layers.show(layer), split(seen), strict=True):
            gathered = (
                part.index_select(0, blocks).view(rows, num_blocks, *part.shape[1:]).transpose(1, 2).flatten(2, 3)
                for part in packed.tensors()
            )
            both.append(PackedKeys(Packed(packed.scheme, *gathered), recent, view))
        return both[0], both[1]

    def end(self, lengths: Sequence[int]) -> None:
        if self._long is not None:
            long, self._long = self._long, None
            for row, blocks in zip(self.packed.rows, long.packed.rows, strict=True):
                row += blocks
            for row, blocks in zip(self.recent.table.rows, long.recent.rows, strict=True):
                self.pool.give_back(row)
                row[:] = blocks
            long.packed.rows, long.recent.rows = [], []  # they are this store's now
            self.packed.version += 1
            self.recent.table.version += 1
            self.num_packed = long.targets
        self.recent.forget_pass()
        self.catch_up(lengths)

    def _find_targets(self, lengths: Sequence[int]) -> list[int]:
        size, kept = self.pool.block_size, self.config.residual_length
        return [
            max(count, (length - kept) // size * size) for count, length in zip(self.num_packed, lengths, strict=True)
        ]

    def catch_up(self, lengths: Sequence[int]) -> None:
        """Pack whole blocks that are no longer recent; rows that share one share what it is packed into."""
        if self.is_trying or not self.num_packed:
            return
        targets, size = self._find_targets(lengths), self.pool.block_size
        if targets == self.num_packed:
            return
        with self.pool.lock:
            due = [
                blocks[: (target - count) // size]
                for blocks, target, count in zip(self.recent.table.rows, targets, self.num_packed, strict=True)
            ]
            plain = list(dict.fromkeys(block for blocks in due for block in blocks))
            if self.packed_pool.is_fixed and self.packed_pool.num_free < len(plain):
                return  # another cache was faster: they stay as they are, and the next pass says what is missing
            made = dict(zip(plain, self.packed_pool.take(len(plain)), strict=True))
            for layer, buffer in enumerate(self.pool.buffers):
                index = torch.tensor(plain, device=buffer.device)
                self._layers.pack(layer, buffer.index_select(0, index), list(made.values()))
            taken = [[made[block] for block in blocks] for blocks in due]
            self.packed_pool.share([block for blocks in taken for block in blocks])
            self.packed_pool.give_back(list(made.values()))  # each was taken once, and is counted for its rows now
            for row, (blocks, old) in enumerate(zip(taken, due, strict=True)):
                self.packed.rows[row] += blocks
                del self.recent.table.rows[row][: len(old)]
                self.pool.give_back(old)
            self.packed.version += 1
            self.recent.table.version += 1
            self.num_packed = targets

    def count_steps(self, lengths: Sequence[int]) -> int | None:
        """Steps until there is a block to pack."""
        if self.is_trying or not self.num_packed:
            return self.pool.block_size
        ends = (target + self.pool.block_size + self.config.residual_length for target in self._find_targets(lengths))
        return min(end - length for end, length in zip(ends, lengths, strict=True))

    # --- rows ----------------------------------------------------------------------------------------
    def select(self, index: Sequence[int], lengths: Sequence[int]) -> None:  # blocks know themselves
        self.recent.table.select(index)
        self.packed.select(index)
        self.num_packed = [self.num_packed[row] for row in index]

    def join(self, other: PackedBlockStore, mine: Sequence[int], theirs: Sequence[int]) -> None:
        if other.config != self.config:
            raise SettingError("rows that are packed in another way can't join; make both caches with one cache_config")
        if not mine:
            self.open(0)
        other.catch_up(theirs)
        near = [length - count for length, count in zip(theirs, other.num_packed, strict=True)]
        with self.pool.lock:
            self.pool.ensure(self.recent.table.plan_join(other.recent.table, near)[1])
            join_tables([self.packed], [other.packed], other.num_packed)
            join_tables([self.recent.table], [other.recent.table], near)
        self.num_packed = [*self.num_packed, *other.num_packed]

    def begin_trial(self, lengths: Sequence[int]) -> None:
        self.catch_up(lengths)
        self.is_trying = True

    def truncate(self, lengths: Sequence[int]) -> None:
        """Roll rows back; the first positions of a packed block that stay become plain again."""
        self.is_trying = False
        size, plain, packed = self.pool.block_size, self.recent.table, self.packed
        for row, length in enumerate(lengths):
            if length >= self.num_packed[row]:
                continue
            first = length // size * size
            with self.pool.lock:
                fresh = self.pool.take(1 if length > first else 0)
                for layer in range(self.num_layers if fresh else 0):
                    block = packed.rows[row][first // size]
                    self._layers.unpack(layer, block, self.pool.buffers[layer][fresh[0], : length - first])
                self.pool.give_back(plain.rows[row])
                self.packed_pool.give_back(packed.rows[row][first // size :])
            plain.rows[row][:] = fresh
            del packed.rows[row][first // size :]
            plain.version += 1
            packed.version += 1
            self.num_packed[row] = first
        plain.cut([length - count for length, count in zip(lengths, self.num_packed, strict=True)])
        self.catch_up(lengths)  # what a trial kept back

    def clone(self) -> PackedBlockStore:
        made = PackedBlockStore(self.config, self._fit, self.pool, self.packed_pool)
        made.recent, made.packed = self.recent.clone(), self.packed.clone()
        made.num_packed, made.is_trying = list(self.num_packed), self.is_trying
        return made

    def borrow(self, stores: Sequence[Any]) -> None:
        super().borrow(stores)
        self.num_packed = [count for store in stores for count in store.num_packed]

    def hand_back(self, stores: Sequence[Any]) -> None:
        self._long, counts = None, iter(self.num_packed)
        for store in stores:
            store.num_packed = [next(counts) for _ in store.num_packed]
        super().hand_back(stores)

    # --- memory --------------------------------------------------------------------------------------
    def held(self) -> list[torch.Tensor]:
        return self.pool.buffers

    def places(self) -> Places | None:
        if self._long is not None:
            return None  # read as it came, and packed on its way
        buffers = self.pool.buffers
        if not buffers or not self.num_packed:
            return Places([])
        device, known = buffers[0].device, self._places
        table, packed_table = self.recent.table.put_on(device).table, self.packed.put_on(device).table
        if (
            known is not None
            and known.packed is not None
            and known.packed.num_packed == self.num_packed
            and (known.block_table is table and known.packed.block_table is packed_table)
            and known.buffers
            and known.buffers[-1] is buffers[-1]
            and known.packed.layers[-1][-1] is self.packed_pool.buffers[-1]
        ):
            return known
        parts = self.packed_pool.buffers
        layers = [tuple(parts[first : first + NUM_PARTS]) for first in range(0, len(parts), NUM_PARTS)]
        packed = PackedPlaces(
            layers,
            self._layers.find_schemes(buffers[0].shape[-1]),
            self.pool.block_size,
            list(self.num_packed),
            block_table=packed_table,
        )
        self._places = Places(list(buffers), packed=packed, block_table=table)
        return self.packed_pool.watch(self.pool.watch(self._places))

    def read(self, layer: int, rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        with self.pool.lock:
            buffer, counts = self.pool.buffers[layer], self.num_packed
            recent = self.recent.read(buffer, rows, max(1, length - min(counts, default=0)))
            if not any(counts):
                keys, values = split(recent[:, :length])
                return keys, values
            none = torch.zeros(rows, 0, dtype=torch.int64, device=buffer.device)
            view = PackedView(list(counts), self._send(buffer.device), none, max(counts))
            keys, values = (part.unpack(length) for part in self._show(layer, recent, view))
            return keys, values

    # --- files ---------------------------------------------------------------------------------------
    def pack(self, lengths: Sequence[int]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """What a file says of the rows' blocks, and the blocks themselves."""
        facts: dict[str, Any] = {"num_packed": self.num_packed}
        tensors: dict[str, torch.Tensor] = {}
        near = [length - count for length, count in zip(lengths, self.num_packed, strict=True)]
        for name, table, wanted in (("recent", self.recent.table, near), ("packed", self.packed, self.num_packed)):
            held = table.find_held()
            number = {block: place for place, block in enumerate(held)}
            facts[name] = [
                [number[block] for block in row[: table.pool.count_blocks(length)]]
                for row, length in zip(table.rows, wanted, strict=True)
            ]
            tensors |= {f"{name}.{place}": buffer[held] for place, buffer in enumerate(table.pool.buffers)}
        return facts, tensors

    def unpack(self, facts: dict[str, Any], tensors: dict[str, torch.Tensor], lengths: Sequence[int]) -> None:
        """Take over what `pack` gave; a ValueError says what does not belong together."""
        size, counts = self.pool.block_size, facts["num_packed"]
        plain = [tensors[f"recent.{layer}"] for layer in range(len(tensors) // (NUM_PARTS + 1))]
        parts = [tensors[f"packed.{number}"] for number in range(NUM_PARTS * len(plain))]
        pairs = zip(counts, lengths, strict=True)
        if not all(type(count) is int and 0 <= count <= length and count % size == 0 for count, length in pairs):
            raise ValueError(f"{counts} positions of {list(lengths)} can't be packed")
        for layer, buffer in enumerate(plain):
            if buffer.dim() != 5 or buffer.shape[1:3] != (size, 2):
                raise ValueError(f"layer {layer} of the shape {list(buffer.shape)} has no blocks of {size} positions")
            self.add_layer(layer, 0, KeyFormat.of(buffer))
        for mine, given in zip((*self.pool.buffers, *self.packed_pool.buffers), (*plain, *parts), strict=True):
            if mine.shape[1:] != given.shape[1:] or mine.dtype != given.dtype:
                raise ValueError(f"{given.dtype} {list(given.shape)} stands where {list(mine.shape)} must")
        near = [length - count for length, count in zip(lengths, counts, strict=True)]
        for name, table, wanted, held in (
            ("recent", self.recent.table, near, plain),
            ("packed", self.packed, counts, parts),
        ):
            users = [0] * (len(held[0]) if held else 0)
            read_rows(facts[name], [table.pool.count_blocks(length) for length in wanted], users)
            table.pool.buffers.clear()
            table.pool.adopt(held, users)
            table.rows = [[1 + block for block in row] for row in facts[name]]
        self.num_packed = list(counts)
