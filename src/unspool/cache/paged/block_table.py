"""Which blocks of a pool hold the positions of rows."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice

import torch

from unspool.cache.paged.block_index import BlockIndex
from unspool.cache.paged.pool import NOBODYS, BlockPool


@dataclass(frozen=True, slots=True)
class MissingBlocks:
    """The blocks that rows need before they are written."""

    per_row: list[int]
    shared: list[tuple[int, int]]  # row and place of blocks with other users, which are copied first

    @property
    def count(self) -> int:
        """Blocks to take from the pool."""
        return sum(self.per_row) + len(self.shared)


class BlockTable:
    """The blocks of every row, one list per row; `NOBODYS` where a row has let a block go.

    The blocks go back to the pool when the table is gone.
    """

    def __init__(self, pool: BlockPool, rows: list[list[int]] | None = None, *, owns: bool = True) -> None:
        self.pool, self.rows, self._owns = pool, rows if rows is not None else [], owns
        self.version = 0  # raised whenever a row's blocks change
        self._index: BlockIndex | None = None
        self._sent_version = -1  # the version that the index holds

    def __del__(self) -> None:
        if getattr(self, "_owns", False) and not sys.is_finalizing():
            self.pool.leave(_flatten(self.rows))

    def clone(self) -> BlockTable:
        """A table of the same blocks, each with as many more users."""
        with self.pool.lock:
            self.pool.share(_flatten(self.rows))
            self.version += 1  # the last blocks are shared now
            return BlockTable(self.pool, [list(row) for row in self.rows])

    def put_on(self, device: torch.device, num_blocks: int = 0) -> BlockIndex:
        """The table on a device, up to date, with room for `num_blocks` blocks per row."""
        index = self._index
        if index is None or index.device != device:
            self._index = index = BlockIndex(device)
        elif self._sent_version == self.version and num_blocks <= index.table.shape[1]:
            return index
        index.update(self.rows, num_blocks)
        self._sent_version = self.version
        return index

    def is_up_to_date(self, table: torch.Tensor) -> bool:
        """Whether this is the device's table, and it is up to date."""
        return self._index is not None and self._index.table is table and self._sent_version == self.version

    def find_missing(self, starts: Sequence[int], stops: Sequence[int]) -> MissingBlocks | None:
        """What rows lack for positions from start to stop; None if nothing. The caller holds the pool's lock."""
        pool, size = self.pool, self.pool.block_size
        shared: list[tuple[int, int]] = []
        users: dict[int, int] = {}
        missing: list[int] = []
        count_users = pool.count_users
        for row, (blocks, start, stop) in enumerate(zip(self.rows, starts, stops, strict=True)):
            if stop <= start:
                missing.append(0)
                continue
            needed, held = pool.count_blocks(stop), len(blocks)
            missing.append(needed - held if needed > held else 0)
            for place in range(start // size, needed if needed < held else held):
                block = blocks[place]
                num_users = users[block] if block in users else count_users(block)
                if num_users > 1:
                    users[block] = num_users - 1
                    shared.append((row, place))
        return MissingBlocks(missing, shared) if shared or any(missing) else None

    def take_missing(self, missing: MissingBlocks, filled: Sequence[int] | None = None) -> None:
        """Give rows the blocks that they lack; the pool has that many free. `filled` says up to where each row is
        written at once: only blocks that this leaves partly empty are cleaned."""
        pool = self.pool
        cleaned = None
        if filled is not None:
            lasts = accumulate(missing.per_row)
            whole = zip(missing.per_row, filled, lasts, strict=True)
            cleaned = [last - 1 for count, stop, last in whole if count and stop % pool.block_size]
        fresh = iter(pool.take(sum(missing.per_row), cleaned=cleaned))
        for blocks, count in zip(self.rows, missing.per_row, strict=True):
            blocks += islice(fresh, count)
        if missing.shared:
            before = [self.rows[row][place] for row, place in missing.shared]
            for (row, place), block in zip(missing.shared, pool.copy(before), strict=True):
                self.rows[row][place] = block
            pool.give_back(before)
        self.version += 1

    def grow(self, rows: Sequence[int], blocks: Sequence[int]) -> None:
        """Give rows one new block each, and send a device that is up to date those alone."""
        is_up_to_date = self._index is not None and self._sent_version == self.version
        for row, block in zip(rows, blocks, strict=True):
            self.rows[row].append(block)
        self.version += 1
        if is_up_to_date and self._index is not None and self._index.add(rows, blocks):
            self._sent_version = self.version

    def cut(self, lengths: Sequence[int]) -> None:
        """Give back what rows of these lengths don't need."""
        for blocks, length in zip(self.rows, lengths, strict=True):
            kept = self.pool.count_blocks(length)
            if len(blocks) > kept:
                self.pool.give_back(_flatten([blocks[kept:]]))
                del blocks[kept:]
                self.version += 1

    def let_go(self, firsts: Sequence[int]) -> None:
        """Give back blocks that end before each row's first position; later ones keep their places in the row."""
        size = self.pool.block_size
        for blocks, first in zip(self.rows, firsts, strict=True):
            place = min(max(0, first) // size, len(blocks)) - 1
            while place >= 0 and blocks[place] != NOBODYS:  # what is before it went earlier
                self.pool.give_back([blocks[place]])
                blocks[place] = NOBODYS
                place -= 1
                self.version += 1

    def select(self, index: Sequence[int]) -> None:
        """Let row `i` be what row `index[i]` was: blocks are shared, not copied."""
        old = self.rows
        with self.pool.lock:
            rows = [old[row] if row == place else list(old[row]) for place, row in enumerate(index)]
            stay = {place for place, row in enumerate(index) if row == place}
            self.pool.share(_flatten(row for place, row in enumerate(rows) if place not in stay))
            self.pool.give_back(_flatten(row for place, row in enumerate(old) if place not in stay))
            self.rows = rows
            self.version += 1

    def plan_join(self, other: BlockTable, lengths: Sequence[int]) -> tuple[list[list[int]], int]:
        """The blocks of another table's rows of these lengths, and how many of them must be copied."""
        pool = self.pool
        kept = [row[: pool.count_blocks(length)] for row, length in zip(other.rows, lengths, strict=True)]
        return kept, 0 if other.pool is pool else len(set(_flatten(kept)))

    def join(self, other: BlockTable, kept: list[list[int]]) -> None:
        """Take in rows of another table, after its own."""
        pool = self.pool
        with pool.lock:
            if other.pool is pool:
                pool.share(_flatten(kept))
                self.rows += [list(row) for row in kept]
            else:
                with other.pool.lock:
                    held = sorted(set(_flatten(kept)))
                    number = dict(zip(held, pool.adopt_copies(other.pool, held), strict=True))
                number[NOBODYS] = NOBODYS
                rows = [[number[block] for block in row] for row in kept]
                pool.share(_flatten(rows))
                pool.give_back([number[block] for block in held])  # taken once, and counted for their rows now
                self.rows += rows
            self.version += 1

    def open(self, rows: int) -> None:
        """Begin with rows that hold nothing."""
        self.pool.give_back(_flatten(self.rows))
        self.rows = [[] for _ in range(rows)]
        self.version += 1

    def borrow(self, tables: Sequence[BlockTable]) -> None:
        """Let the rows be those of other tables, which own what is taken for them."""
        self._owns = False
        self.rows = [row for table in tables for row in table.rows]  # the very lists
        self.version += 1

    def count_held(self) -> int:
        """How many blocks the rows hold, each counted once."""
        held = {block for row in self.rows for block in row}
        return len(held) - (NOBODYS in held)

    def find_held(self) -> list[int]:
        """The blocks of all rows, each once."""
        return sorted(set(_flatten(self.rows)))


def _flatten(rows: Iterable[Sequence[int]]) -> list[int]:
    return [block for row in rows for block in row if block != NOBODYS]


def reserve_blocks(
    tables: Sequence[BlockTable], starts: Sequence[int], stops: Sequence[int], *, is_filled: bool = False
) -> None:
    """Give the rows of tables over one pool blocks of their own for positions from start to stop.

    With `is_filled` all these positions are written before anything is read. Raises and changes nothing if the pool
    has too few for all of them.
    """
    pool = tables[0].pool
    with pool.lock:
        missing = [table.find_missing(starts, stops) for table in tables]
        if any(each is not None for each in missing):
            pool.ensure(sum(each.count for each in missing if each is not None))
            for table, each in zip(tables, missing, strict=True):
                if each is not None:
                    table.take_missing(each, stops if is_filled else None)


def join_tables(mine: Sequence[BlockTable], others: Sequence[BlockTable], lengths: Sequence[int]) -> None:
    """Let tables over one pool take in the rows of others, or raise and change nothing."""
    pool = mine[0].pool
    with pool.lock:
        plans = [table.plan_join(other, lengths) for table, other in zip(mine, others, strict=True)]
        pool.ensure(sum(count for _, count in plans))
        for table, other, (kept, _) in zip(mine, others, plans, strict=True):
            table.join(other, kept)
