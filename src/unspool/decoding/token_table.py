"""The tokens of rows by position. Columns that all rows got wait in a list: what nobody looks at is not written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F

from unspool.kernels.beam_choice import ChosenBeams
from unspool.kernels.sending import fetch, send
from unspool.protocols import TokenLog

CHUNK = 64  # columns by which tables grow, and the most that wait
Numbers = np.ndarray[Any, np.dtype[np.int64]]
MOST_MOVES = 4  # of rows between columns that wait, if each is launched


class Moved(Protocol):
    """Rows that each went on from another row, and then got a token."""

    @property
    def parents(self) -> torch.Tensor:
        """(rows,): the row that each went on from."""
        ...

    @property
    def column(self) -> torch.Tensor:
        """(rows, 1): the tokens."""
        ...


@dataclass(frozen=True, slots=True)
class MovedColumn:
    """A column that rows got after each had gone on from another row; looked at when it is needed."""

    moved: Moved

    @property
    def tokens(self) -> torch.Tensor:
        """(rows, 1)."""
        return self.moved.column

    @property
    def sources(self) -> torch.Tensor:
        """(rows,)."""
        return self.moved.parents

    @property
    def on_host(self) -> tuple[Numbers, Numbers] | None:
        """Both on the host, (rows,) each, if they are there."""
        read = self.moved.on_host if isinstance(self.moved, ChosenBeams) else None
        return None if read is None else (read.tokens, read.parents)


LateColumn = torch.Tensor | list[int] | MovedColumn
"""A token for each row: (rows, 1), on the host, or after the rows have moved."""


class TokenTable:
    """Position `p` of a row stands in column `p`; `lengths` are always those of the rows, waiting columns included."""

    def __init__(self, tokens: torch.Tensor, pad_token_id: int) -> None:
        self._tokens = tokens  # (rows, room)
        self._fill = pad_token_id
        # Columns that nobody has asked for yet, and after them steps that a device has in its log.
        self._waiting: list[LateColumn] = []
        self._log: tuple[TokenLog, int, int] | None = None  # the number of the last one, and how many they are

    @property
    def device(self) -> torch.device:
        """Where the tokens are."""
        return self._tokens.device

    @property
    def _late(self) -> list[LateColumn]:
        """The columns that wait to be entered, those of a log among them."""
        if self._log is not None:
            (log, last, count), self._log = self._log, None
            self._waiting += log.read_log(last, count).clamp(min=0)[:, :, None].unbind(1)
        return self._waiting

    @property
    def num_late(self) -> int:
        """Columns that wait."""
        return len(self._late)

    @property
    def newest(self) -> torch.Tensor | None:
        """The column (rows, 1) that came last, if it waits and is on the device."""
        newest = self._late[-1] if self._late else None
        newest = newest.tokens if isinstance(newest, MovedColumn) else newest
        return newest if isinstance(newest, torch.Tensor) else None

    @property
    def newest_on_host(self) -> list[int] | None:
        """The column that came last, if it waits and is on the host."""
        newest = self._late[-1] if self._late else None
        return newest if isinstance(newest, list) else None

    def read(self, lengths: Sequence[int]) -> torch.Tensor:
        """All tokens: (rows, room)."""
        self.enter_late(lengths)
        return self._tokens

    def write(self, tokens: torch.Tensor, lengths: Sequence[int]) -> None:
        """Write tokens (rows, new) after what the rows have."""
        self.enter_late(lengths)
        self._tokens = enter(self._tokens, tokens, lengths, self._fill)

    def wait(self, *columns: LateColumn) -> None:
        """Take columns that are written once somebody looks."""
        self._late.extend(columns)

    def wait_for_log(self, log: TokenLog, lengths: Sequence[int]) -> None:
        """Take the column that the last step of a log chose, without a look at it; the lengths are those before it."""
        last, count = log.num_logged, 0
        if self._log is not None and self._log[:2] == (log, last - 1) and self._log[2] + 2 < log.most_logged:
            count = self._log[2]  # one more step may be taken before the log is read
        elif self.num_late >= CHUNK:
            self.enter_late(lengths)
        self._log = (log, last, count + 1)

    def read_late(self, place: int) -> torch.Tensor:
        """A column that waits, on the device: (rows, 1)."""
        late = self._late[place]
        if isinstance(late, MovedColumn):
            return late.tokens
        if isinstance(late, list):
            late = self._late[place] = send(late, self.device)[:, None]
        return late

    def enter_late(self, lengths: Sequence[int]) -> None:
        """Enter the columns that wait, together as far as rows did not move between them."""
        moves = [place for place, late in enumerate(self._late) if isinstance(late, MovedColumn)]
        if len(moves) > MOST_MOVES:
            self._follow_moves()
            moves = []
        edges = [0, *(place for place in moves if place), len(self._late)] if self._late else []
        for first, stop in pairwise(edges):
            opening = self._late[first]
            if isinstance(opening, MovedColumn):
                self._tokens = self._tokens.index_select(0, opening.sources)
            columns = [self.read_late(place) for place in range(first, stop)]
            tokens = columns[0] if len(columns) == 1 else torch.cat(columns, dim=1)
            starts = [length - len(self._late) + first for length in lengths]
            self._tokens = enter(self._tokens, tokens, starts, self._fill)
        self._waiting = []

    def _follow_moves(self) -> None:
        """Let the rows, and the columns that wait, follow all moves among them at once: worked out on the host, which
        waits for them, as launching every move takes longer."""
        known = [late.on_host if isinstance(late, MovedColumn) else None for late in self._late]
        away = [place for place, own in enumerate(known) if own is None]
        if away:
            columns = torch.cat([self.read_late(place) for place in away], dim=1)
            itself = torch.arange(len(columns), device=columns.device)
            lates = [self._late[place] for place in away]
            moves = [late.sources if isinstance(late, MovedColumn) else itself for late in lates]
            fetched = fetch(columns), fetch(torch.stack(moves))
            tokens, sources = (part.read().numpy() for part in fetched)
            for number, place in enumerate(away):
                known[place] = (tokens[:, number], sources[number])
        row = np.arange(len(self._tokens))
        followed = np.empty((len(row), len(known)), np.int64)
        for place, own in reversed(list(enumerate(known))):
            assert own is not None
            followed[:, place] = own[0][row]
            row = own[1][row]
        self._tokens = self._tokens.index_select(0, send(row.tolist(), self.device))
        sent = send(followed.ravel().tolist(), self.device).view(followed.shape)
        self._waiting = list(sent.split(1, dim=1))

    def take_back(self, count: int) -> bool:
        """Forget the last columns, if all of them wait and rows have moved before the last; whether it was so."""
        if count > len(self._late) or not isinstance(self._late[-1], MovedColumn):
            return False
        del self._late[len(self._late) - count :]
        return True

    def select(self, index: torch.Tensor, lengths: Sequence[int]) -> None:
        """Keep, repeat or reorder rows."""
        self._tokens = self.read(lengths).index_select(0, index)


def enter(table: torch.Tensor, tokens: torch.Tensor, starts: Sequence[int], fill: int) -> torch.Tensor:
    """Write tokens (rows, new) into each row from its start on, in place or into a table that has grown."""
    num_new, room, stop = tokens.shape[1], table.shape[1], max(starts) + tokens.shape[1]
    if stop > room:
        table = F.pad(table, (0, stop + CHUNK - room), value=fill)
    if min(starts) == max(starts):
        table[:, starts[0] : starts[0] + num_new] = tokens
        return table
    column = send(starts, table.device)[:, None] + torch.arange(num_new, device=table.device)
    return table.scatter_(1, column, tokens)
