"""Where rows stand in their grammars, found from their tokens alone: rows may fork, move, leave and be taken back."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from unspool.errors import SettingError
from unspool.grammar.compiling import Grammar, read_error
from unspool.grammar.sources import require_library
from unspool.kernels.cpu.library import count_threads
from unspool.wording import about

_SPARE = 16  # states that are kept beside those of the last rows
_MOST_THREADS = 8


@lru_cache(maxsize=1)
def find_executor() -> Any:
    """Native threads that work on the states of several rows."""
    return require_library().LLExecutor(min(count_threads(), _MOST_THREADS))


@dataclass(eq=False, slots=True)
class MatcherState:
    """A grammar's matcher after some tokens."""

    grammar: Grammar
    matcher: Any
    tokens: list[int] = field(default_factory=list)
    is_broken: bool = False  # its last token is one that the grammar does not allow
    num_moves: int = 0  # how often it has changed

    def move_to(self, tokens: Sequence[int]) -> None:
        """Take back what differs, and read the rest."""
        held, common = self.tokens, _count_common(self.tokens, tokens)
        self.num_moves += 1
        if common < len(held):
            if self.is_broken:
                held.pop()  # the matcher never took it
                self.is_broken = False
            if common < len(held):
                self.matcher.rollback(len(held) - common)
                del held[common:]
        new = list(tokens[common:])
        if new and not self.is_broken:
            num_taken = self.matcher.try_consume_tokens(new)
            self.is_broken = num_taken < len(new)
            held += new[: num_taken + 1]

    def take(self, token: int) -> bool:
        """Read one token more, if the grammar allows it."""
        if self.matcher.try_consume_tokens([token]) != 1:
            return False
        self.num_moves += 1
        self.tokens.append(token)
        return True

    def note(self, token: int, *, was_taken: bool) -> None:
        """Note the token that the matcher was given; one that is refused leaves it useless."""
        self.num_moves += 1
        if not was_taken:
            self.is_broken = True
            self.matcher = self.grammar.start()
            self.matcher.try_consume_tokens(self.tokens)
        self.tokens.append(token)

    def copy(self) -> MatcherState:
        """A state of its own at the same place."""
        return MatcherState(self.grammar, self.matcher.deep_copy(), list(self.tokens), self.is_broken)


def _count_common(one: Sequence[int], two: Sequence[int]) -> int:
    shortest = min(len(one), len(two))
    if one[:shortest] == two[:shortest]:
        return shortest
    return next(place for place in range(shortest) if one[place] != two[place])


@dataclass(slots=True)
class _Held:
    """States from which others can be found, shared by the processors of a call's rows."""

    states: OrderedDict[MatcherState, None] = field(default_factory=OrderedDict)  # the latest last
    most_rows: int = 0  # of one call

    def keep(self, found: Sequence[MatcherState | None]) -> None:
        present = dict.fromkeys(state for state in found if state is not None)
        self.most_rows = max(self.most_rows, len(present))
        for state in present:
            self.states.pop(state, None)
            self.states[state] = None
        while len(self.states) > 2 * self.most_rows + _SPARE:
            self.states.popitem(last=False)


@dataclass(frozen=True, slots=True)
class Texts:
    """What the rows of a call have written."""

    ids: torch.Tensor  # (rows, columns), on the host
    starts: list[int]  # the column in which each row's own text begins; beyond the last one: it has not begun

    @property
    def has_begun(self) -> bool:
        """Whether each row's text has."""
        return max(self.starts, default=0) <= self.ids.shape[1]

    def list_rows(self) -> list[list[int] | None]:
        """Each row's tokens; None where none may be written yet."""
        columns = self.ids.shape[1]
        pairs = zip(self.ids.tolist(), self.starts, strict=True)
        return [row[start:] if start <= columns else None for row, start in pairs]


@dataclass(frozen=True, slots=True)
class _Seen:
    """The last call's rows; a state that has moved since is no longer its row's."""

    texts: Texts | None  # None: nothing follows them as they are; the states are near those of the next call
    grammars: list[Grammar | None]
    states: list[MatcherState | None]
    num_moves: list[int]

    @classmethod
    def of(cls, texts: Texts | None, grammars: list[Grammar | None], states: list[MatcherState | None]) -> _Seen:
        # A copy of the tokens: the table that they stand in may be written over.
        kept = None if texts is None or not texts.has_begun else Texts(texts.ids.clone(), texts.starts)
        return cls(kept, grammars, states, [state.num_moves if state else 0 for state in states])

    def is_followed_by(self, texts: Texts, grammars: list[Grammar | None]) -> bool:
        """Whether texts have a column more than these, and each row a state of its own, which no other has moved."""
        if self.texts is None:
            return False
        rows, columns = self.texts.ids.shape
        present = [state for state in self.states if state is not None]
        return (
            texts.ids.shape == (rows, columns + 1)
            and texts.starts == self.texts.starts
            and grammars == self.grammars
            and self.num_moves == [state.num_moves if state else 0 for state in self.states]
            and len({id(state) for state in present}) == len(present)
            and torch.equal(self.texts.ids, texts.ids[:, :-1])
        )

    def has_reached(self, rows: Sequence[list[int] | None], grammars: Sequence[Grammar | None]) -> bool:
        """Whether the states stand behind these rows' tokens already, each behind one row's."""
        present = [state for state in self.states if state is not None]
        return (
            list(grammars) == self.grammars
            and len(present) == len(rows) == len({id(state) for state in present})
            and all(state.tokens == row for state, row in zip(present, rows, strict=True))
        )

    def select(self, index: list[int]) -> _Seen:
        texts = self.texts
        return _Seen(
            None if texts is None else Texts(texts.ids[index], [texts.starts[row] for row in index]),
            [self.grammars[row] for row in index],
            [self.states[row] for row in index],
            [self.num_moves[row] for row in index],
        )


class States:
    """The states of the rows seen last, from which the next rows' are found."""

    def __init__(self) -> None:
        self._held = _Held()
        self._seen: _Seen | None = None

    def find(self, grammars: list[Grammar | None], texts: Texts, ends: Container[int]) -> list[MatcherState | None]:
        """The state of each row after its text; None for a row without a grammar, or one that has ended, or whose text
        has not begun."""
        if self._seen is not None and self._seen.is_followed_by(texts, grammars):
            states = _step(self._seen.states, texts.ids[:, -1].tolist(), ends)
        else:
            states = self._search(grammars, texts.list_rows(), ends)
        self._seen = _Seen.of(texts, grammars, states)
        return states

    def find_own(self, grammars: list[Grammar | None], texts: Texts, ends: Container[int]) -> list[MatcherState | None]:
        """`find`, with a state of its own for every row; one whose text has not begun has its grammar's first."""
        rows = [[] if row is None else row for row in texts.list_rows()]
        states = _set_apart(self._search(grammars, rows, ends))
        self._held.keep(states)
        self._seen = _Seen.of(texts, grammars, states)
        return states

    def find_apart(
        self, grammars: list[Grammar | None], rows: Sequence[list[int]], ends: Container[int]
    ) -> list[MatcherState | None]:
        """The same for rows of any lengths; each has a state of its own."""
        if len({len(row) for row in rows}) == 1:
            found = self.find(grammars, Texts(torch.tensor(rows), [0] * len(rows)), ends)
        else:
            self._seen, found = None, self._search(grammars, rows, ends)
        return _set_apart(found)

    def join(self, other: States, counts: tuple[int, int]) -> States:
        """The states of so many rows and, after them, of another's."""
        joined = States()
        for state in (*self._held.states, *other._held.states):
            joined._held.states[state] = None
        joined._held.most_rows = self._held.most_rows + other._held.most_rows
        grammars: list[Grammar | None] = []
        states: list[MatcherState | None] = []
        for one, count in zip((self, other), counts, strict=True):
            seen = one._seen
            is_whole = seen is not None and len(seen.states) == count
            grammars += seen.grammars if seen is not None and is_whole else [None] * count
            states += seen.states if seen is not None and is_whole else [None] * count
        joined._seen = _Seen.of(None, grammars, states)
        return joined

    def select(self, index: Sequence[int]) -> States:
        """The states of the rows at `index`; states of all rows can be found from both."""
        chosen = States()
        chosen._held = self._held
        if self._seen is not None and max(index, default=0) < len(self._seen.states):
            chosen._seen = self._seen.select(list(index))
        return chosen

    def _search(
        self, grammars: Sequence[Grammar | None], rows: Sequence[list[int] | None], ends: Container[int]
    ) -> list[MatcherState | None]:
        """The states of rows that may be others than the last call's, or were followed token by token since."""
        if self._seen is not None and self._seen.has_reached(rows, grammars):
            return self._seen.states
        free = dict.fromkeys(self._held.states)
        found: list[MatcherState | None] = []
        used: dict[tuple[int, tuple[int, ...]], MatcherState] = {}
        for place, (grammar, tokens) in enumerate(zip(grammars, rows, strict=True)):
            if grammar is None or tokens is None or any(token in ends for token in tokens):
                found.append(None)
                continue
            key = (id(grammar), tuple(tokens))
            state = used.get(key)
            if state is None:  # rows with the same tokens share a state: it is only read
                state = self._choose(grammar, tokens, place, free)
                state.move_to(tokens)
                used[key] = state
            found.append(state)
        self._held.keep(found)
        return found

    def _choose(self, grammar: Grammar, tokens: list[int], place: int, free: dict[MatcherState, None]) -> MatcherState:
        """A state to move to some tokens: one that no other row wants, or a copy, or a new one."""
        if self._seen is not None and place < len(self._seen.states):
            near = self._seen.states[place]
            if near is not None and near in free and near.grammar is grammar and near.tokens in (tokens[:-1], tokens):
                del free[near]
                return near
        best, most = None, 0
        for state in self._held.states:
            if state.grammar is grammar:
                common = _count_common(state.tokens, tokens)
                if common > most or (common == most and state in free and best is not None and best not in free):
                    best, most = state, common
        if best is None:
            return MatcherState(grammar, grammar.start())
        if best in free and len(best.tokens) - most <= 1:  # at most a token is taken back that others may come back to
            del free[best]
            return best
        return best.copy()


def _set_apart(found: Sequence[MatcherState | None]) -> list[MatcherState | None]:
    """The states, with copies for all but the first row of those that several rows share."""
    known: set[MatcherState] = set()
    apart: list[MatcherState | None] = []
    for state in found:
        apart.append(state.copy() if state is not None and state in known else state)
        if state is not None:
            known.add(state)
    return apart


def _step(
    states: Sequence[MatcherState | None], tokens: Sequence[int], ends: Container[int]
) -> list[MatcherState | None]:
    """States after one token more each; none of them belongs to two rows."""
    pairs = zip(states, tokens, strict=True)
    found = [None if state is None or token in ends else state for state, token in pairs]
    moved = [
        (state, token) for state, token in zip(found, tokens, strict=True) if state is not None and not state.is_broken
    ]
    work = [(state.matcher, token) for state, token in moved]
    taken = (
        find_executor().consume_token_par(work) if len(work) > 1 else [one.consume_token(token) for one, token in work]
    )
    for (state, token), was_taken in zip(moved, taken, strict=True):
        state.note(token, was_taken=was_taken)
    return found


def check_state(state: MatcherState) -> None:
    """Raise if a grammar has given up: its text has become too complex for the limits."""
    if not state.is_broken and state.matcher.is_error():
        reason = read_error(state.matcher.get_error())
        raise SettingError(
            about(
                state.grammar.source.setting,
                f"became too complex after {len(state.tokens)} tokens: {reason}; use a "
                "simpler pattern or fewer alternatives",
            )
        )
