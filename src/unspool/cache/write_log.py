"""Which rows hold the same keys up to where: what beams need not copy when they change places."""

from __future__ import annotations

from collections.abc import Sequence


class WriteLog:
    """Who wrote each position of each row. Rows that followed one another share the positions before they parted."""

    def __init__(self, rows: int) -> None:
        self._written: list[list[int]] = [[] for _ in range(rows)]  # a number for every write, one list per row
        self._num_written = 0

    def note(self, lengths: Sequence[int]) -> None:
        """Note what rows of these lengths have got since the last time."""
        for written, length in zip(self._written, lengths, strict=True):
            while len(written) < length:
                self._num_written += 1
                written.append(self._num_written)

    def truncate(self, lengths: Sequence[int]) -> None:
        """Follow rows that were rolled back."""
        for written, length in zip(self._written, lengths, strict=True):
            del written[length:]

    def select(self, index: Sequence[int]) -> None:
        """Follow rows that were reordered."""
        self._written = [list(self._written[row]) for row in index]

    def find_parting(self, index: Sequence[int]) -> int:
        """The first position at which any moved row differs from the row whose place it takes."""
        parting = max(map(len, self._written), default=0)
        for row, source in enumerate(index):
            if row != source:
                mine, theirs = self._written[row], self._written[source]
                parting = min(parting, len(mine), len(theirs))
                while parting > 0 and mine[parting - 1] != theirs[parting - 1]:
                    parting -= 1
        return parting
