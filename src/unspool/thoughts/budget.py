"""The processor that ends thoughts at a number of tokens: a function of the visible tokens, like every processor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import torch

from unspool.kernels.sending import send
from unspool.logits.base import LogitsProcessor
from unspool.logits.building import Build
from unspool.thoughts.parts import Phase
from unspool.thoughts.places import Place, RowPlaces, ThoughtMarks, require_marks

Value = TypeVar("Value")
_NEVER: Final = 1 << 40  # columns
_TAIL: Final = 128  # columns of a prompt in which it is looked for what it leaves open


class BudgetRow(NamedTuple):
    """What a budget asks of a row."""

    budget: int | None
    first_column: int  # of its text
    phase: Phase  # in which its prompt leaves it

    def move(self, shift: int) -> BudgetRow:
        """The same with so many columns more before it."""
        return self._replace(first_column=self.first_column + shift)


def spread(values: list[Value], num_rows: int) -> list[Value]:
    """A value for each of so many rows, of one for all or one for each."""
    return values if len(values) == num_rows else values * num_rows


class ThinkingBudgetLogitsProcessor(LogitsProcessor):
    """Ends each row's thoughts at its own number of tokens, by the words with which the model ends them itself.

    A row's text begins after its first column, behind a prompt that leaves it in a thought, behind one, or before one.
    The tokens of a thought are counted from behind its mark. One that ends before its budget is left as it is.
    """

    follows_moves = True

    def __init__(self, rows: Sequence[BudgetRow], marks: ThoughtMarks) -> None:
        self._rows = list(rows)  # one for all, or one for each
        self._marks = marks
        self._places = RowPlaces(marks)
        spans = [self._find_span(row) for row in self._rows]  # none, when all rows have left
        self._firsts = np.array([first for first, _ in spans], dtype=np.int64)
        self._stops = np.array([stop for _, stop in spans], dtype=np.int64)

    @classmethod
    def make(cls, build: Build) -> ThinkingBudgetLogitsProcessor:
        """The processor that the call's setting asks for."""
        marks, num_rows = require_marks(build.setting, build.context.tokenizer), build.context.num_rows
        budgets = build.value if isinstance(build.value, list) else [build.value] * num_rows
        phases, first = find_phases(build, marks), build.first_free_column
        rows = [BudgetRow(budget, first, phase) for budget, phase in zip(budgets, phases, strict=True)]
        return cls(rows if len(set(rows)) > 1 else rows[:1], marks)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """The scores (rows, vocab), -inf for all but the next word of the end in rows whose budget is spent."""
        may_force = self._may_force(input_ids.shape[1])
        if not may_force.any():
            return scores
        own = spread(self._rows, len(scores))
        places = np.flatnonzero(may_force).tolist() if len(may_force) == len(own) else list(range(len(own)))
        asked = [own[place] for place in places]
        first = min(row.first_column for row in asked)
        ids = input_ids[:, first:] if len(places) == len(input_ids) else input_ids[places, first:]
        starts = [row.first_column - first for row in asked]
        found = self._places.find(ids.cpu(), starts, [row.phase for row in asked])
        wanted = [self._find_forced(row, one) for row, one in zip(asked, found, strict=True)]
        forced = [(place, token) for place, token in zip(places, wanted, strict=True) if token is not None]
        if not forced:
            return scores
        chosen = send([row for row, _ in forced], scores.device)
        tokens = send([token for _, token in forced], scores.device)[:, None]
        kept = scores[chosen].gather(1, tokens)
        made = scores.clone()
        made[chosen] = torch.full_like(made[chosen], -torch.inf).scatter(1, tokens, kept)
        return made

    def find_forbidden(self, width: int) -> Sequence[int] | None:
        """Nothing in most steps; None where a budget may end."""
        return None if self._may_force(width).any() else ()

    def _may_force(self, columns: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """The rows that may end a thought at so many columns: most steps need no look at the tokens."""
        return (self._firsts <= columns) & (columns < self._stops)

    def _find_span(self, row: BudgetRow) -> tuple[int, int]:
        """The columns in which a row's budget may end."""
        repeats = self._marks.kind.repeats
        if row.budget is None or (row.phase == "closed" and not repeats):
            return 0, 0
        first = row.first_column + row.budget
        latest = len(self._marks.closing) + (0 if row.phase == "open" else self._marks.longest_begin)
        return first, _NEVER if repeats else first + latest

    def _find_forced(self, row: BudgetRow, place: Place) -> int | None:
        """The token that must come, if one must."""
        closing = self._marks.closing
        assert row.budget is not None
        over = place.num - row.budget  # tokens of the closing words that are there
        if place.phase == "closed" and over > 0:  # the thought ended by them: what begins the answer is left
            over += place.seen - place.end
        elif place.phase != "open" or over < 0:
            return None
        return closing[over] if over < len(closing) else None

    def join(self, other: Any, counts: tuple[int, int], shifts: tuple[int, int]) -> LogitsProcessor | None:
        """The processor for the rows of both, if their thoughts are of a kind."""
        if self._marks is not other._marks:
            return None
        sets = zip((self, other), counts, shifts, strict=True)
        moved = [row.move(shift) for one, count, shift in sets for row in spread(one._rows, count)]
        return ThinkingBudgetLogitsProcessor(moved, self._marks)

    def select_rows(self, index: torch.Tensor) -> LogitsProcessor:
        """The processor for the rows at `index`."""
        if len(self._rows) == 1:
            return self
        return ThinkingBudgetLogitsProcessor([self._rows[row] for row in index.tolist()], self._marks)


def find_phases(build: Build, marks: ThoughtMarks) -> list[Phase]:
    """Where each row's prompt leaves its text."""
    given = build.context.encoder_input_ids
    if given is None:
        return ["free"] * build.context.num_rows
    ids = given if isinstance(given, torch.Tensor) else given()
    found = [marks.find_phase(row) for row in ids[:, -_TAIL:].tolist()]
    copies = build.context.num_rows // len(found)
    return [phase for phase in found for _ in range(copies)]
