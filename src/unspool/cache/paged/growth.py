"""When rows take their next blocks, if they grow by one position a step."""

from __future__ import annotations

from typing import Final

from unspool.cache.paged.block_table import BlockTable

_AHEAD: Final = 16  # steps whose blocks are taken together, if there are many


class Growth:
    """The rows of a table by the step at which each takes its next block: a step looks at those whose time has come.

    It holds for as long as no other thread changes the table or the rows' lengths.
    """

    def __init__(self, table: BlockTable, lengths: list[int]) -> None:
        self.lengths = lengths
        self._table, self._version, self._now = table, table.version, 0
        self._due: dict[int, list[int]] = {}
        size = table.pool.block_size
        for row, (blocks, length) in enumerate(zip(table.rows, lengths, strict=True)):
            self._due.setdefault(len(blocks) * size - length + 1, []).append(row)

    @classmethod
    def begin(cls, table: BlockTable, lengths: list[int]) -> Growth | None:
        """Follow rows from these lengths on; None if one has blocks past its end that others hold too."""
        pool, size = table.pool, table.pool.block_size
        for blocks, length in zip(table.rows, lengths, strict=True):
            if any(pool.count_users(block) > 1 for block in blocks[-(-length // size) :]):
                return None
        return cls(table, lengths)

    def fits(self, lengths: list[int]) -> bool:
        """Whether everything is as it was after the last step; `lengths` must be the very list."""
        return lengths is self.lengths and self._table.version == self._version

    def step(self) -> list[int]:
        """Give every row room for one position more; the new lengths. Raises and changes nothing if there is none."""
        now = self._now + 1
        if now in self._due:
            self._take(now)
        self._now = now
        self.lengths = [length + 1 for length in self.lengths]
        return self.lengths

    def _take(self, now: int) -> None:
        table, due = self._table, self._due
        pool, size = table.pool, table.pool.block_size
        with pool.lock:
            # Taken ahead, because whatever is sent to a device costs the same for one block as for many.
            is_plenty = pool.num_free >= 2 * len(table.rows) + pool.num_blocks // 4
            steps = [step for step in range(now, now + _AHEAD) if step in due] if is_plenty else [now]
            rows = [row for step in steps for row in due[step]]
            table.grow(rows, pool.take(len(rows)))
        for step in steps:
            due.setdefault(step + size, []).extend(due.pop(step))
        self._version = table.version
