"""The history of rows on the host: every column is fetched from the device once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from unspool.kernels.sending import Fetched, fetch

ROOM = 64  # columns by which the table grows


@dataclass(frozen=True, slots=True)
class _Coming:
    """Columns on their way."""

    values: Fetched  # (rows, columns), or (rows,) if it is one
    num_columns: int
    index: list[int] | None = None  # which of its rows are wanted; None: all

    def read(self) -> torch.Tensor:
        values = self.values.read()
        values = values.view(len(values), self.num_columns)
        return values if self.index is None else values[self.index]


class HostHistory:
    """The columns of rows that end in one column; who changes a column that was read says so (`cut`)."""

    def __init__(self) -> None:
        self._table: torch.Tensor | None = None  # (rows, room)
        self._num_known = 0  # its columns
        self._coming: list[_Coming] = []  # those that follow

    def expects(self, width: int) -> bool:
        """Whether it is the last of `width` columns that is missing."""
        return self._find_end() == width - 1

    def expect(self, tokens: Fetched, width: int) -> None:
        """Note that the last of `width` columns is on its way, so that nobody has to fetch it."""
        if self.expects(width):
            self._coming.append(_Coming(tokens, 1))

    def begin(self, history: torch.Tensor) -> None:
        """Begin to fetch what is missing of a history (rows, width)."""
        width, end = history.shape[1], self._find_end()
        if end > width:
            self.cut(width)
        elif end < width:
            self._coming.append(_Coming(fetch(history[:, end:]), width - end))

    def read(self, history: torch.Tensor) -> torch.Tensor:
        """The history (rows, width) on the host, to look at until the next call."""
        self.begin(history)
        rows, width = history.shape
        if self._table is None or self._table.shape[1] < width:
            held = self._table
            self._table = torch.zeros(rows, width + ROOM, dtype=torch.int64)
            if held is not None:
                self._table[:, : held.shape[1]] = held
        for one in self._coming:
            after = self._num_known + one.num_columns
            self._table[:, self._num_known : after] = one.read().clamp(min=0)  # as the rows enter them
            self._num_known = after
        self._coming.clear()
        return self._table[:, :width]

    def select(self, index: Sequence[int]) -> None:
        """Keep, repeat or reorder rows."""
        chosen = list(index)
        if self._table is not None:
            self._table = self._table[chosen]
        self._coming = [
            replace(one, index=chosen if one.index is None else [one.index[place] for place in chosen])
            for one in self._coming
        ]

    def cut(self, width: int) -> None:
        """Forget the columns from `width` on: they may become others."""
        while self._coming and self._find_end() > width:
            self._coming.pop()
        self._num_known = min(self._num_known, width)

    def forget(self) -> None:
        """Forget everything."""
        self._table, self._num_known, self._coming = None, 0, []

    def _find_end(self) -> int:
        return self._num_known + sum(one.num_columns for one in self._coming)
