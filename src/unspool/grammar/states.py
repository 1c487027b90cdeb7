"""Where rows stand in their grammars, found from their tokens alone: rows may fork, move, leave and be taken back."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from unspool.errors import SettingError
from unspool.grammar.compiling import Grammar, read_error

_SPARE = 16  # states that are kept beside those of the last rows


@dataclass(eq=False, slots=True)
class State:
    """A grammar's matcher after some tokens."""

    grammar: Grammar
    matcher: Any
    tokens: list[int] = field(default_factory=list)
    is_broken: bool = False  # its last token is one that the grammar does not allow

    def move_to(self, tokens: Sequence[int]) -> None:
        """Take back what differs, and read the rest."""
        held, common = self.tokens, _count_common(self.tokens, tokens)
        if common < len(held):
            if self.is_broken:
                held.pop()  # the matcher never took it
                self.is_broken = False
            if common < len(held):
                self.matcher.rollback(len(held) - common)
                del held[common:]
        for token in tokens[common:]:
            if self.is_broken:
                return
            self.is_broken = not self.matcher.try_consume_tokens([token])
            held.append(token)

    def copy(self) -> State:
        """A state of its own at the same place."""
        return State(self.grammar, self.matcher.deep_copy(), list(self.tokens), self.is_broken)


def _count_common(one: Sequence[int], two: Sequence[int]) -> int:
    shortest = min(len(one), len(two))
    if one[:shortest] == two[:shortest]:
        return shortest
    return next(place for place in range(shortest) if one[place] != two[place])


class States:
    """The states of the rows seen last, from which the next rows' are found."""

    def __init__(self) -> None:
        self._held: OrderedDict[State, None] = OrderedDict()  # the latest last
        self._last: list[State | None] = []  # by the rows' places in the last call
        self._seen: torch.Tensor | None = None  # the history of that call
        self._grammars: list[Grammar | None] = []  # and the grammars of its rows

    def find(self, grammars: Sequence[Grammar | None], rows: Sequence[Sequence[int]]) -> list[State | None]:
        """The state of each row after its tokens; None for a row without a grammar."""
        free = dict.fromkeys(self._held)
        found: list[State | None] = []
        used: dict[tuple[int, tuple[int, ...]], State] = {}
        for place, (grammar, tokens) in enumerate(zip(grammars, rows, strict=True)):
            if grammar is None:
                found.append(None)
                continue
            key = (id(grammar), tuple(tokens))
            state = used.get(key)
            if state is None:  # rows with the same tokens share a state: it is only read
                state = self._choose(grammar, tokens, place, free)
                state.move_to(tokens)
                used[key] = state
            found.append(state)
        self._keep(found)
        return found

    def step(self, tokens: Sequence[int], ends: Container[int]) -> list[State | None] | None:
        """The states of the last call's rows after one token more each; None if one of them has ended."""
        moved = [(state, token) for state, token in zip(self._last, tokens, strict=True) if state is not None]
        if any(token in ends for _, token in moved):
            return None
        for state, token in moved:
            if not state.is_broken:
                state.is_broken = not state.matcher.try_consume_tokens([token])
                state.tokens.append(token)
        return self._last

    def remember(self, history: torch.Tensor, grammars: list[Grammar | None]) -> None:
        """Note what the last call's rows were."""
        self._seen = history.clone()  # what it was: the table may be written over
        self._grammars = grammars

    def went_on(self, history: torch.Tensor, grammars: list[Grammar | None]) -> bool:
        """Whether a history is the last call's and a column more, so that `step` can move its rows' states.

        The processors of some of the rows share these states: other rows may have the same tokens.
        """
        seen = self._seen
        return (
            seen is not None
            and seen.shape[0] == history.shape[0]
            and seen.shape[1] + 1 == history.shape[1]
            and grammars == self._grammars
            and self._are_apart()
            and torch.equal(seen, history[:, :-1])
        )

    def _are_apart(self) -> bool:
        """Whether each of the last call's rows has a state of its own."""
        present = [state for state in self._last if state is not None]
        return len({id(state) for state in present}) == len(present)

    def _choose(self, grammar: Grammar, tokens: Sequence[int], place: int, free: dict[State, None]) -> State:
        """A state to move to some tokens: one that nobody else wants, or a copy, or a new one."""
        before = list(tokens[:-1])
        if place < len(self._last):
            near = self._last[place]
            if near is not None and near in free and near.grammar is grammar and near.tokens in (before, list(tokens)):
                del free[near]
                return near
        best, most = None, 0
        for state in self._held:
            if state.grammar is grammar:
                common = _count_common(state.tokens, tokens)
                if common > most or (common == most and state in free and best is not None and best not in free):
                    best, most = state, common
        if best is None:
            return State(grammar, grammar.start())
        if best in free and len(best.tokens) - most <= 1:  # at most a token is taken back that others may come back to
            del free[best]
            return best
        return best.copy()

    def _keep(self, found: list[State | None]) -> None:
        self._last = found
        present = dict.fromkeys(state for state in found if state is not None)
        for state in present:
            self._held.pop(state, None)
            self._held[state] = None
        while len(self._held) > 2 * len(present) + _SPARE:
            self._held.popitem(last=False)


def check_state(state: State) -> None:
    """Raise if a grammar has given up: its text has become too complex for the limits."""
    if not state.is_broken and state.matcher.is_error():
        told = read_error(state.matcher.get_error())
        raise SettingError(
            f"`{state.grammar.source.setting}` became too complex after {len(state.tokens)} tokens: {told}; use a "
            "simpler pattern or fewer alternatives"
        )
