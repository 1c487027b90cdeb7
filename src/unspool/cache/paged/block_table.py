"""Which blocks of a pool hold the positions of rows."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import islice

from unspool.cache.paged.pool import BlockPool


class BlockTable:
    """Which blocks hold a row's positions, a list a row; gives them back when nobody needs the table any more."""

    def __init__(self, pool: BlockPool, rows: list[list[int]] | None = None, *, owns: bool = True) -> None:
        self.pool, self.rows, self._owns = pool, rows if rows is not None else [], owns
        self.version = 0  # another one whenever a row's blocks are others

    def __del__(self) -> None:
        if getattr(self, "_owns", False) and not sys.is_finalizing():
            self.pool.give_back([block for row in self.rows for block in row])

    def clone(self) -> BlockTable:
        """A table of the same blocks, each with as many more users."""
        with self.pool.lock:
            self.pool.share([block for row in self.rows for block in row])
            return BlockTable(self.pool, [list(row) for row in self.rows])

    def make_room(self, starts: Sequence[int], stops: Sequence[int]) -> None:
        """Give every row blocks of its own for positions from its start to its stop, or raise and change nothing.

        A block that others hold too is copied before the row writes to it.
        """
        pool, size = self.pool, self.pool.block_size
        if all(start == stop for start, stop in zip(starts, stops, strict=True)):
            return
        with pool.lock:
            shared: list[tuple[int, int]] = []  # row, place in its list
            users: dict[int, int] = {}
            for row, (start, stop) in enumerate(zip(starts, stops, strict=True)):
                blocks = self.rows[row]
                for place in range(start // size, min(len(blocks), pool.count_blocks(stop)) if stop > start else 0):
                    block = blocks[place]
                    num_users = users.get(block, pool.count_users(block))
                    if num_users > 1:
                        users[block] = num_users - 1
                        shared.append((row, place))
            missing = [
                max(0, pool.count_blocks(stop) - len(blocks)) for blocks, stop in zip(self.rows, stops, strict=True)
            ]
            if not shared and not any(missing):
                return
            pool.ensure(sum(missing) + len(shared))
            fresh = iter(pool.take(sum(missing)))
            for blocks, count in zip(self.rows, missing, strict=True):
                blocks += islice(fresh, count)
            before = [self.rows[row][place] for row, place in shared]
            for (row, place), block in zip(shared, pool.copy(before), strict=True):
                self.rows[row][place] = block
            pool.give_back(before)
            self.version += 1

    def cut(self, lengths: Sequence[int]) -> None:
        """Give back what rows of these lengths have no use for."""
        for blocks, length in zip(self.rows, lengths, strict=True):
            kept = self.pool.count_blocks(length)
            if len(blocks) > kept:
                self.pool.give_back(blocks[kept:])
                del blocks[kept:]
                self.version += 1

    def select(self, index: Sequence[int]) -> None:
        """Let row `i` be what row `index[i]` was: blocks are shared, not copied."""
        old = self.rows
        with self.pool.lock:
            rows = [old[row] if row == place else list(old[row]) for place, row in enumerate(index)]
            stay = {place for place, row in enumerate(index) if row == place}
            self.pool.share([block for place, row in enumerate(rows) if place not in stay for block in row])
            self.pool.give_back([block for place, row in enumerate(old) if place not in stay for block in row])
            self.rows = rows
            self.version += 1

    def join(self, other: BlockTable, lengths: Sequence[int]) -> None:
        """Take in another table's rows, of these lengths, after one's own; or raise and change nothing."""
        pool = self.pool
        kept = [row[: pool.count_blocks(length)] for row, length in zip(other.rows, lengths, strict=True)]
        with pool.lock:
            if other.pool is pool:
                pool.share([block for row in kept for block in row])
                self.rows += kept
            else:
                with other.pool.lock:
                    held = sorted({block for row in kept for block in row})
                    number = dict(zip(held, pool.adopt_copies(other.pool, held), strict=True))
                rows = [[number[block] for block in row] for row in kept]
                taken = [block for row in rows for block in row]
                pool.share(taken)
                pool.give_back(list(number.values()))  # each was taken once, and is counted for its rows now
                self.rows += rows
            self.version += 1

    def open(self, rows: int) -> None:
        """Begin with so many rows that hold nothing."""
        self.rows = [[] for _ in range(rows)]
        self.version += 1

    def find_held(self) -> list[int]:
        """The blocks of all rows, each once."""
        return sorted({block for row in self.rows for block in row})
