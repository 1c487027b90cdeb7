"""Plain keys and values in blocks of a pool: every key, or in layers with a window those that are still in view.

Layers with the same window share a table of blocks. If only some layers of a model have a window, layers are put into
groups of the same size, each with a table of its own, so that one pool serves all groups: what a window has let go is
free for any other layer. A position keeps its index; a block that was let go is `NOBODYS` in the table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from unspool.cache.paged.block_group import BlockGroup
from unspool.cache.paged.block_table import BlockTable, join_tables, reserve_blocks
from unspool.cache.paged.pool import BlockPool
from unspool.cache.paged.pooled import PooledStore, read_rows
from unspool.cache.places import Places
from unspool.cache.span import Span
from unspool.cache.stores.memory import KeyFormat, split
from unspool.errors import SettingError, UnsupportedError
from unspool.kernels.presence import has_triton
from unspool.kernels.ragged import Ragged

if TYPE_CHECKING:
    from unspool.kernels.gpu.attention.forks import ForkKeeper


class BlockStore(PooledStore):
    """Keys and values in blocks, which rows take as they grow, share, and give back."""

    is_trying: bool = False

    def __init__(self, pool: BlockPool, windows: Sequence[int | None] = ()) -> None:
        super().__init__(pool)
        self.windows = tuple(windows)
        self.groups: list[BlockGroup] = []
        self._homes: list[tuple[int, int]] = []  # group and number of the buffer, one per layer; empty: one group
        self._group_layers()
        self._keeper: tuple[Places, ForkKeeper] | None = None  # for as long as the places are these

    def _group_layers(self) -> None:
        kinds = dict.fromkeys(self.windows)
        if len(kinds) < 2:
            self.groups = [BlockGroup(self.pool, next(iter(kinds), None))]
            return
        size = min(self.windows.count(window) for window in kinds)
        found: dict[tuple[int | None, int], int] = {}  # window and how many such groups came before -> group
        seen: dict[int | None, int] = dict.fromkeys(kinds, 0)
        for window in self.windows:
            key = (window, seen[window] // size)
            if key not in found:
                found[key] = len(self.groups)
                self.groups.append(BlockGroup(self.pool, window))
            self._homes.append((found[key], seen[window] % size))
            seen[window] += 1

    def _find(self, layer: int) -> tuple[BlockGroup, int]:
        if not self._homes:
            return self.groups[0], layer
        group, number = self._homes[layer]
        return self.groups[group], number

    def _open(self, layer: int, kv: torch.Tensor) -> tuple[BlockGroup, torch.Tensor]:
        group, number = self._find(layer)
        if number < len(self.pool.buffers):
            return group, self.pool.buffers[number]
        return group, self.pool.open_layer(number, KeyFormat.of(kv))

    @property
    def num_layers(self) -> int:
        num_open = len(self.pool.buffers)
        return sum(number < num_open for _, number in self._homes) if self._homes else num_open

    def add_layer(self, layer: int, rows: int, keys: KeyFormat) -> None:  # blocks are for any number
        self.pool.open_layer(self._find(layer)[1], keys)

    @property
    def tables(self) -> list[BlockTable]:
        return [group.table for group in self.groups]

    def find_only_table(self) -> BlockTable | None:
        """The one table, if no layer lets blocks go; else None."""
        return self.tables[0] if len(self.groups) == 1 and self.groups[0].window is None else None

    # --- a pass --------------------------------------------------------------------------------------
    def open(self, rows: int) -> None:
        for table in self.tables:
            table.open(rows)

    def reserve(self, starts: Sequence[int], stops: Sequence[int], stop: int) -> None:
        """Blocks for what each row really gets: what a short row has past its end is written nowhere."""
        self.catch_up(starts)
        reserve_blocks(self.tables, starts, stops)

    def reserve_pass(self, starts: Sequence[int], stops: Sequence[int]) -> None:
        """The same for a pass that writes all of it."""
        self.catch_up(starts)
        reserve_blocks(self.tables, starts, stops, is_filled=True)

    def begin(self, span: Span) -> None:  # worked out when a layer is written
        for group in self.groups:
            group.forget_pass()

    def write(self, layer: int, span: Span, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with self.pool.lock:
            group, buffer = self._open(layer, kv)
            return split(group.write(buffer, span, kv))

    def write_flat(self, layer: int, span: Span, kv: torch.Tensor, ragged: Ragged) -> tuple[torch.Tensor, torch.Tensor]:
        with self.pool.lock:
            group, buffer = self._open(layer, kv)
            move = group.plan_flat(span, ragged, kv.device)
            buffer.flatten(0, 1).index_copy_(0, move.slots, kv)
            room = self.pool.count_blocks(span.stop) * self.pool.block_size  # cut shorter, rows would be copied apart
            keys, values = group.view(buffer, move, len(span.starts), room).unbind(2)
            return keys, values

    def end(self, lengths: Sequence[int]) -> None:
        for group in self.groups:
            group.forget_pass()
        self.catch_up(lengths)

    def catch_up(self, lengths: Sequence[int]) -> None:
        if not self.is_trying:
            for group in self.groups:
                group.let_go(lengths)

    def count_steps(self, lengths: Sequence[int]) -> int | None:
        """Within what rows hold already, if there may not be a block more for each of them."""
        pool = self.pool
        if pool.is_fixed and pool.num_free < 2 * len(lengths) * len(self.groups):
            table, size = self.tables[0], pool.block_size
            return min(len(row) * size - length for row, length in zip(table.rows, lengths, strict=True))
        return None

    # --- rows ----------------------------------------------------------------------------------------
    def select(self, index: Sequence[int], lengths: Sequence[int]) -> None:  # blocks know themselves
        for table in self.tables:
            table.select(index)

    def join(self, other: BlockStore, mine: Sequence[int], theirs: Sequence[int]) -> None:
        """Blocks of one pool are counted for both; those of another are copied."""
        if other.windows != self.windows:
            raise SettingError(f"rows of windows {other.windows} can't join those of {self.windows}")
        if not mine:
            self.open(0)
        other.catch_up(theirs)
        join_tables(self.tables, other.tables, theirs)

    def begin_trial(self, lengths: Sequence[int]) -> None:
        self.catch_up(lengths)
        self.is_trying = any(group.window is not None for group in self.groups)

    def check_truncation(self, held: Sequence[int], lengths: Sequence[int]) -> None:
        for group in self.groups:
            if group.window is None:
                continue
            for row, (blocks, old, new) in enumerate(zip(group.table.rows, held, lengths, strict=True)):
                first = max(0, new - group.window + 1) // self.pool.block_size
                if new and first < len(blocks) and not blocks[first]:
                    raise UnsupportedError(
                        f"row {row} can't roll back from {old} positions to {new}: a window of {group.window} let go "
                        "what it would need. Call begin_trial() before tokens that may have to go, or keep every key "
                        "with cache_implementation='paged'"
                    )

    def truncate(self, lengths: Sequence[int]) -> None:
        self.is_trying = False
        for group in self.groups:
            group.table.cut(lengths)
            group.let_go(lengths)

    def clone(self) -> BlockStore:
        return self._with([group.clone() for group in self.groups])

    def _with(self, groups: list[BlockGroup]) -> BlockStore:
        """The same layers with other tables."""
        made = BlockStore(self.pool, self.windows)
        made.groups, made.is_trying = groups, self.is_trying
        return made

    def take_part(self, first: int, step: int) -> BlockStore:
        """A store over every `step`-th row, which writes for the rows of this one."""
        # The very lists of this store: what a part takes or copies, this one has.
        return self._with(
            [
                BlockGroup(self.pool, group.window, BlockTable(self.pool, group.table.rows[first::step], owns=False))
                for group in self.groups
            ]
        )

    # --- candidates after every row ------------------------------------------------------------------
    def write_forks(
        self,
        layer: int,
        kv: torch.Tensor,
        place: int | None,  # a place is in another block of each row
        find_slots: Callable[[], torch.Tensor],
        stop: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with self.pool.lock:
            group, buffer = self._open(layer, kv)
            move = group.plan_forks(find_slots, stop, kv.device)
            buffer.flatten(0, 1).index_copy_(0, move.slots, kv.flatten(0, 1))
            return split(group.view(buffer, move, kv.shape[0], stop))

    def keep_forks(self, chosen: torch.Tensor, lengths: Sequence[int]) -> None:
        places = self.places() if chosen.is_cuda and has_triton() else None
        if places is not None and places.block_table is not None:
            if self._keeper is None or self._keeper[0] is not places:
                from unspool.kernels.gpu.attention.forks import ForkKeeper  # Triton is imported where a GPU is used

                self._keeper = (places, ForkKeeper(places.buffers, places.block_table))
            self._keeper[1].keep(chosen, list(lengths))
            return
        ends, size = torch.tensor(lengths, device=chosen.device)[:, None], self.pool.block_size  # (rows, 1)
        index = self.tables[0].put_on(chosen.device)  # one for all layers: what lets blocks go has no forks
        source = index.find_slots(ends + chosen[:, None], size)[:, 0]
        target = index.find_slots(ends, size)[:, 0]
        for buffer in self.held():
            flat = buffer.flatten(0, 1)
            flat.index_copy_(0, target, flat.index_select(0, source))

    # --- memory --------------------------------------------------------------------------------------
    def held(self) -> list[torch.Tensor]:
        return [self.pool.buffers[self._find(layer)[1]] for layer in range(self.num_layers)]

    def places(self) -> Places | None:
        known = self._places
        if known is not None and self._is_current(known):
            return known
        buffers = self.held()
        if not buffers or not self.tables[0].rows:
            return Places([])
        device = buffers[0].device
        width = max(table.put_on(device).table.shape[1] for table in self.tables)
        tables = [table.put_on(device, width).table for table in self.tables]
        known = self._places
        if known is not None and len(known.buffers) == len(buffers) and known.buffers[-1] is buffers[-1]:
            first = known.block_table if known.layer_tables is None else known.layer_tables[0]
            is_same = known.layer_tables is None or all(
                table is tables[group] for table, (group, _) in zip(known.layer_tables, self._homes, strict=True)
            )
            if first is tables[0] and is_same:
                return known
        if self._homes:
            self._places = Places(buffers, layer_tables=[tables[group] for group, _ in self._homes])
        else:
            self._places = Places(buffers, block_table=tables[0])
        return self.pool.watch(self._places)

    def last_places(self) -> Places | None:
        known = self._places
        return known if known is not None and self.tables[0].rows and self._has_buffers(known) else self.places()

    def _has_buffers(self, places: Places) -> bool:
        """Whether the places of one table have the buffers of the pool."""
        buffers = self.pool.buffers
        return (
            len(places.buffers) == len(buffers) and places.buffers[-1] is buffers[-1] and places.block_table is not None
        )

    def _is_current(self, places: Places) -> bool:
        """Whether nothing has changed since the places of one table were last asked for."""
        table = places.block_table
        return self._has_buffers(places) and table is not None and self.groups[0].table.is_up_to_date(table)

    def read(self, layer: int, rows: int, length: int) -> torch.Tensor:
        with self.pool.lock:
            group, number = self._find(layer)
            return group.read(self.pool.buffers[number], rows, length)

    # --- files ---------------------------------------------------------------------------------------
    def pack(self, lengths: Sequence[int]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """What a file says of the rows' blocks, and the blocks themselves."""
        held = sorted({block for table in self.tables for block in table.find_held()})
        number = {block: place for place, block in enumerate(held)} | {0: -1}
        rows = [
            [
                [number[block] for block in row[: self.pool.count_blocks(length)]]
                for row, length in zip(table.rows, lengths, strict=True)
            ]
            for table in self.tables
        ]
        facts = {"rows": rows[0] if len(rows) == 1 else rows}
        return facts, {f"layer.{layer}": buffer[held] for layer, buffer in enumerate(self.pool.buffers)}

    def unpack(self, facts: dict[str, Any], tensors: dict[str, torch.Tensor], lengths: Sequence[int]) -> None:
        """Take over what `pack` gave; a ValueError says what does not belong together."""
        buffers = [tensors[f"layer.{layer}"] for layer in range(len(tensors))]
        num_held, size = len(buffers[0]) if buffers else 0, self.pool.block_size
        shapes = {tuple(buffer.shape) for buffer in buffers}
        if len(shapes) > 1 or any(shape[1:3] != (size, 2) or len(shape) != 5 for shape in shapes):
            raise ValueError(f"layers of the shapes {sorted(shapes)} are no blocks of {size} positions")
        tables = [facts["rows"]] if len(self.groups) == 1 else facts["rows"]
        users = [0] * num_held
        for group, rows in zip(self.groups, tables, strict=True):
            read_rows(rows, [self.pool.count_blocks(length) for length in lengths], users, group.window is not None)
        self.pool.adopt(buffers, users)
        for group, rows in zip(self.groups, tables, strict=True):
            group.table.rows = [[1 + block for block in row] for row in rows]
