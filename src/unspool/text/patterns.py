r"""How long a regular expression of a tokenizer can take, read off its text.

The tokenizers library searches by backtracking and can't be interrupted. Its engine gives up a single match after ten
million steps, so what can take hours is a search that fails again and again, at every place of a long text. Running a
pattern shows only the texts that are tried, so it is proved here instead that a pattern's work grows in proportion to
the text. The proof is for the form that tokenizers' patterns have, alternatives that are rows of single characters
(`[…]`, `\p{L}`, `x`), each repeated or not:

- a row whose rest can't fail once its first endless repetition has begun (` ?\p{L}+`, `[^\s]+[\r\n]*`) takes all that
  it has looked at;
- a row that can still fail there (`\s*[\r\n]+`) looks at a run of characters and may give it back. It is harmless if
  the alternative after it takes the same run whole (`\s+`): each run is then looked at a few times, not once for each
  of its characters.

Without such a proof the work grows at most with the power `degree` of the text's length, one more than the
repetitions in a row; or without any bound that is known (`degree` is None) where repetitions are nested, refer back,
or are written in a way that is not known here. `work` says what becomes of those.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

MAX_CHOICES = 512  # ways to match the bounded parts of a pattern
MAX_COUNT = 64  # of a bounded repetition of characters
MAX_NESTING = 20

_COUNT = re.compile(r"\{(\d{0,3})(,?)(\d{0,3})\}")
_CHARACTER = re.compile(
    r"\\(?:[pP]\{\^?[A-Za-z_0-9 ]+\}|[sSdDwWhHrntfve]|x[0-9A-Fa-f]{2}|x\{[0-9A-Fa-f]+\}|u[0-9A-Fa-f]{4}|[^\w\s])"
)
_ANCHOR = re.compile(r"\\[bBAzZ]|[$^]")
_OPENING = re.compile(r"\((?:\?(?:(?P<look>=|!|<=|<!)|[im]*(?:-[im]+)?:)|(?![?*]))")

# Patterns in use that repeat a group, and how their work grows: the parts of each can be read in one way only.
_KNOWN = {r"(?:\r?\n)+(?!\r?\n)": 2}


@dataclass(frozen=True)
class PatternCost:
    """What a pattern may cost: the power of the text's length, the tries at each place; and its shortest match."""

    degree: int | None
    tries: int = 1
    shortest: int = 0  # characters


@dataclass(frozen=True)
class _Step:
    """One member of a row: a character, a group or an assertion, and how often it is repeated."""

    text: str
    kind: str  # "character", "group" or "assertion"
    low: int = 1
    high: int | None = 1
    mode: str = ""  # "?" for lazy, "+" for possessive
    num_loops: int = 0  # endless repetitions within, its own too
    choices: int = 1  # ways to match it
    shortest: int = 1  # characters, once


_Row = tuple[_Step, ...]


class _UnclearError(Exception):
    """A pattern of another form than is known here."""


@lru_cache(maxsize=256)
def find_cost(pattern: str) -> PatternCost:
    """How a pattern's work grows with the text."""
    if pattern in _KNOWN:
        return PatternCost(_KNOWN[pattern])
    try:
        rows = _Reader(pattern.removeprefix("(?i)")).read()
        tries = _check_choices(sum(map(_count_choices, rows)))
    except (_UnclearError, IndexError):
        return PatternCost(degree=None)
    is_linear = all(_is_row_linear(rows, index) for index in range(len(rows)))
    degree = 1 if is_linear else 1 + max(map(_count_loops, rows))
    return PatternCost(degree, tries, min(map(_measure_shortest, rows)))


class _Reader:
    """Reads a pattern into rows of steps."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0
        self._depth = 0

    def read(self) -> list[_Row]:
        rows = self._read_rows()
        if self._at < len(self._pattern):
            raise _UnclearError
        return rows

    def _read_rows(self) -> list[_Row]:
        rows: list[_Row] = []
        row: list[_Step] = []
        while self._at < len(self._pattern) and self._pattern[self._at] != ")":
            if self._pattern[self._at] == "|":
                self._at += 1
                rows.append(tuple(row))
                row = []
            else:
                row.append(self._read_step())
        return [*rows, tuple(row)]

    def _read_step(self) -> _Step:
        start, pattern = self._at, self._pattern
        sign = pattern[start]
        if found := _OPENING.match(pattern, start):
            step = self._read_group(found)
        elif found := _ANCHOR.match(pattern, start):
            self._at = found.end()
            step = _Step(found[0], "assertion", shortest=0)
        elif sign == "[":
            self._at = self._find_end_of_class(start)
            step = _Step(pattern[start : self._at], "character")
        elif found := _CHARACTER.match(pattern, start):
            self._at = found.end()
            step = _Step(found[0], "character")
        elif sign in "\\()*+?{":
            raise _UnclearError
        else:
            self._at += 1
            step = _Step(sign, "character")
        return self._read_repetition(step)

    def _read_group(self, found: re.Match[str]) -> _Step:
        start, self._at = self._at, found.end()
        self._depth += 1
        if self._depth > MAX_NESTING:
            raise _UnclearError
        rows = self._read_rows()
        self._depth -= 1
        if self._pattern[self._at] != ")":
            raise _UnclearError
        self._at += 1
        return _Step(
            self._pattern[start : self._at],
            "assertion" if found["look"] else "group",
            num_loops=max(map(_count_loops, rows)),
            choices=_check_choices(sum(map(_count_choices, rows))),
            shortest=0 if found["look"] else min(map(_measure_shortest, rows)),
        )

    def _find_end_of_class(self, start: int) -> int:
        at, depth, pattern = start, 0, self._pattern
        while True:
            if pattern[at] == "\\":
                at += 1
            elif pattern[at] == "[":
                depth += 1
                if pattern[at + 1] == "]" or pattern[at + 1 : at + 3] == "^]":  # which may mean itself
                    raise _UnclearError
            elif pattern[at] == "]":
                depth -= 1
            at += 1
            if not depth:
                return at

    def _read_repetition(self, step: _Step) -> _Step:
        sign = self._pattern[self._at : self._at + 1]
        low, high = {"?": (0, 1), "*": (0, None), "+": (1, None)}.get(sign, (1, 1))
        size = 1 if sign in ("?", "*", "+") else 0
        if found := _COUNT.match(self._pattern, self._at):
            if not found[1] and not found[3]:  # which means itself
                raise _UnclearError
            low = int(found[1] or 0)
            high = low if not found[2] else (int(found[3]) if found[3] else None)
            size = len(found[0])
        if not size:
            return step
        self._at += size
        if step.kind == "assertion":
            raise _UnclearError
        mode = self._pattern[self._at : self._at + 1]
        if found and mode in ("?", "+", "*", "{"):
            # After a count, `+` repeats once more, as if the counted were a group; `?` differs between engines.
            if mode != "+" or step.kind != "character" or high is None:
                raise _UnclearError
            self._at += 1
            return replace(step, kind="group", text=step.text + found[0], low=1, high=None, num_loops=2)
        if mode in ("?", "+"):
            self._at += 1
        if self._pattern[self._at : self._at + 1] in ("?", "+", "*", "{"):
            raise _UnclearError
        return _repeat(step, low, high, mode if mode in ("?", "+") else "")


def _repeat(step: _Step, low: int, high: int | None, mode: str) -> _Step:
    if high is None:
        if step.kind == "group" and (step.num_loops or step.choices > 1):
            raise _UnclearError  # the same text could be read in very many ways
        return replace(step, low=low, high=None, mode=mode, num_loops=1)
    # Bounded repetitions multiply what is repeated.
    if low > high or high > (MAX_COUNT if step.kind == "character" else 2):  # engines differ about the first
        raise _UnclearError
    choices = _check_choices((high - low + 1) * step.choices ** max(1, high))
    return replace(step, low=low, high=high, mode=mode, num_loops=step.num_loops * max(1, high), choices=choices)


def _check_choices(number: int) -> int:
    if number > MAX_CHOICES:
        raise _UnclearError
    return number


def _count_loops(row: _Row) -> int:
    return sum(step.num_loops for step in row)


def _count_choices(row: _Row) -> int:
    number = 1
    for step in row:
        number = _check_choices(number * step.choices)
    return number


def _measure_shortest(row: _Row) -> int:
    return sum(step.shortest * step.low for step in row)


def _is_row_linear(rows: Sequence[_Row], index: int) -> bool:
    """Whether the work of an alternative is in proportion to the text: the proof of the module's docstring."""
    before, loop, rest = _divide(rows[index])
    if loop is None or _never_fails(loop, rest) or _takes_all(loop, rest):
        return True
    if not _gives_back(loop, rest):
        return False
    for later in rows[index + 1 :]:
        its_before, its_loop, its_rest = _divide(later)
        if its_loop is None or its_before != before or its_loop.text != loop.text:
            return False
        if _takes_all(its_loop, its_rest):
            return True
        if not _gives_back(its_loop, its_rest):
            return False
    return False


def _divide(row: _Row) -> tuple[_Row, _Step | None, _Row]:
    """A row's steps before its first endless repetition, that one, and those after it."""
    for index, step in enumerate(row):
        if step.num_loops:
            return row[:index], step, row[index + 1 :]
    return row, None, ()


def _never_fails(loop: _Step, rest: _Row) -> bool:
    if loop.kind == "assertion" or loop.high is not None:
        return False
    return all(_can_be_left_out(step) for step in rest)


def _can_be_left_out(step: _Step) -> bool:
    return step.low == 0 and (step.kind == "character" or (step.kind == "group" and not step.num_loops))


def _gives_back(loop: _Step, rest: _Row) -> bool:
    """Whether a row looks at a run of characters, then goes back in it by single looks until it ends or matches."""
    if loop.kind != "character" or loop.high is not None or loop.low > 1 or loop.mode == "?" or not rest:
        return False
    first = rest[0]
    is_one_look = first.low == 1 and not (first.mode == "?" or first.kind == "group" or first.high not in (1, None))
    is_one_look = is_one_look and (first.kind == "character" or not first.num_loops)
    return is_one_look and all(map(_can_be_left_out, rest[1:]))


def _takes_all(loop: _Step, rest: _Row) -> bool:
    """Whether a row takes a whole run of characters (but for its last one, which `(?!\\S)` leaves to what follows)."""
    if loop.kind != "character" or loop.high is not None or loop.low > 1 or loop.mode == "?":
        return False
    if loop.text == r"\s" and loop.mode != "+" and [step.text for step in rest] == [r"(?!\S)"]:
        return True
    return _never_fails(loop, rest)
