"""The history of rows on the host: every column is fetched from the device once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

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
        table = self._make_room(width, rows)
        self._take_in(table)
        return table[:, :width]

    def know(self, history: torch.Tensor) -> None:
        """Note a history (rows, width) that is on the host already."""
        self._table, self._num_known, self._coming = history, history.shape[1], []

    def join(self, other: HostHistory, ends: tuple[int, int], shifts: tuple[int, int], fill: int) -> None:
        """Take in other rows after these, which all end in one column from now on: both move to the right, `fill`
        stands before them. What is not known of both, up to their ends, will be fetched."""
        if (self._find_end(), other._find_end()) != ends:
            self.forget()
            return
        tables = []
        for one, end, shift in zip((self, other), ends, shifts, strict=True):
            table = one._make_room(end)
            one._take_in(table)
            tables.append(F.pad(table[:, :end], (shift, ROOM), value=fill))
        self.know(torch.cat(tables))
        self._num_known = ends[0] + shifts[0]

    def _make_room(self, width: int, num_rows: int | None = None) -> torch.Tensor:
        """The table, with room for `width` columns."""
        held = self._table
        if held is not None and held.shape[1] >= width:
            return held
        count = len(held) if held is not None else num_rows if num_rows is not None else len(self._coming[0].read())
        self._table = table = torch.zeros(count, width + ROOM, dtype=torch.int64)
        if held is not None:
            table[:, : held.shape[1]] = held
        return table

    def _take_in(self, table: torch.Tensor) -> None:
        """Enter what was on its way, for which the table has room."""
        for one in self._coming:
            after = self._num_known + one.num_columns
            table[:, self._num_known : after] = one.read().clamp(min=0)  # as the rows enter them
            self._num_known = after
        self._coming.clear()

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
