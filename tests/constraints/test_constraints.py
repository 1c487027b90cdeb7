from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unspool import errors
from unspool.constraints import Constraint, ConstraintListState, DisjunctiveConstraint, PhrasalConstraint

TOKENS = st.integers(0, 3)
PHRASES = st.lists(TOKENS, min_size=1, max_size=4)


def are_apart(phrases: list[list[int]]) -> bool:
    """Whether no phrase begins another."""
    pairs = [(a, b) for i, a in enumerate(phrases) for b in phrases[i + 1 :]]
    return not any(a[: len(b)] == b[: len(a)] for a, b in pairs)


ALTERNATIVES = st.lists(PHRASES, min_size=1, max_size=4).filter(are_apart)
WORDS = st.lists(
    st.one_of(PHRASES.map(PhrasalConstraint), ALTERNATIVES.map(DisjunctiveConstraint)), min_size=1, max_size=3
)


def contains(sequence: list[int], phrase: list[int]) -> bool:
    return any(sequence[i : i + len(phrase)] == phrase for i in range(len(sequence) - len(phrase) + 1))


# --- one phrase -----------------------------------------------------------------------------------------


def test_a_phrase_is_written_token_by_token() -> None:
    constraint = PhrasalConstraint([5, 6, 5])
    assert (constraint.seqlen, constraint.remaining(), constraint.advance()) == (3, 3, 5)
    assert constraint.update(5) == (True, False, False)
    assert (constraint.remaining(), constraint.advance()) == (2, 6)
    assert constraint.does_advance(6) and not constraint.does_advance(5)
    assert constraint.update(6) == (True, False, False)
    assert constraint.update(5) == (True, True, False)
    assert (constraint.completed, constraint.remaining(), constraint.advance()) == (True, 0, None)
    assert not constraint.does_advance(5)


def test_a_wrong_token_throws_the_progress_away() -> None:
    constraint = PhrasalConstraint([5, 6])
    constraint.update(5)
    assert constraint.update(7) == (False, False, True)
    assert (constraint.remaining(), constraint.advance(), constraint.completed) == (2, 5, False)
    single = PhrasalConstraint([5])
    assert single.update(4) == (False, False, True)
    assert single.update(5) == (True, True, False)
    single.reset()
    assert (single.completed, single.advance()) == (False, 5)


@pytest.mark.parametrize("ids", [[], (1, 2), 3, None, [1, -1], [1.0], ["1"], [True], [[1]], [2**31], torch.tensor([1])])
def test_a_phrase_is_a_list_of_ids(ids: Any) -> None:
    with pytest.raises(errors.SettingError, match="token_ids"):
        PhrasalConstraint(ids)


@pytest.mark.parametrize("constraint", [PhrasalConstraint([1]), DisjunctiveConstraint([[1]])])
@pytest.mark.parametrize("token", [torch.tensor(1), 1.0, "1", None])
def test_a_token_is_an_int(constraint: Constraint, token: Any) -> None:
    with pytest.raises(TypeError, match="token_id"):
        constraint.does_advance(token)
    with pytest.raises(TypeError, match="token_id"):
        constraint.update(token)
    with pytest.raises(TypeError, match="token_id"):
        ConstraintListState([constraint]).add(token)


# --- alternatives ---------------------------------------------------------------------------------------


def test_alternatives_share_their_beginning() -> None:
    constraint = DisjunctiveConstraint([[1, 2, 3], [1, 2, 4, 5], [1, 2, 5], [7]])
    assert (constraint.seqlen, constraint.advance(), constraint.remaining()) == (4, [1, 7], 4)
    assert constraint.update(1) == (True, False, False)
    assert constraint.update(2) == (True, False, False)
    assert (constraint.advance(), constraint.current_seq, constraint.remaining()) == ([3, 4, 5], [1, 2], 2)
    assert constraint.update(5) == (True, True, False)
    assert (constraint.completed, constraint.remaining(), constraint.advance()) == (True, 0, None)
    assert constraint.current_seq == [1, 2, 5]
    constraint.reset()
    assert (constraint.completed, constraint.current_seq, constraint.advance()) == (False, [], [1, 7])
    assert constraint.update(7) == (True, True, False)
    constraint.reset()
    constraint.update(1)
    assert constraint.update(7) == (False, False, True)
    assert constraint.current_seq == []


@pytest.mark.parametrize(
    "phrases",
    [
        [[1, 2], [1, 2, 3, 4]],
        [[1, 2, 3, 4], [1, 2]],
        [[1], [2], [1]],
        [[3], [1, 2], [1]],
        [[1], [1, 2]],
        [[1], []],
        [[]],
        [],
        [1, 2],
        ([1], [2]),
        [(1, 2)],
        [[1, -2]],
        [[1.5]],
        torch.tensor([[1, 2, 4], [1, 2, 3]]),
        [torch.tensor([1, 2, 4]), torch.tensor([1, 2, 3, 4, 5])],
    ],
)
def test_alternatives_that_cannot_be(phrases: Any) -> None:
    with pytest.raises(errors.SettingError, match="nested_token_ids"):
        DisjunctiveConstraint(phrases)


@given(st.lists(st.lists(TOKENS, min_size=1, max_size=4), min_size=1, max_size=4))
def test_alternatives_are_refused_exactly_if_one_begins_another(phrases: list[list[int]]) -> None:
    if are_apart(phrases):
        constraint = DisjunctiveConstraint(phrases)
        for phrase in phrases:
            assert [constraint.update(token)[1] for token in phrase] == [False] * (len(phrase) - 1) + [True]
            constraint.reset()
    else:
        with pytest.raises(ValueError):
            DisjunctiveConstraint(phrases)


# --- several of them ------------------------------------------------------------------------------------


def test_the_bank_counts_the_steps() -> None:
    state = ConstraintListState([PhrasalConstraint([1, 2, 3]), DisjunctiveConstraint([[4, 5], [6]])])
    assert (state.max_seqlen, state.n_constraints, state.completed) == (3, 2, False)
    assert (state.advance(), state.get_bank()) == ([1, 4, 6], 0)
    assert state.add(9) == (False, False)
    assert state.add(1) == (False, True)
    assert (state.advance(), state.get_bank()) == ([2], 1)
    assert state.add(4) == (False, False)  # breaks the phrase, and is not looked at again
    assert (state.advance(), state.get_bank()) == ([4, 6, 1], 0)
    assert state.add(6) == (True, True)
    assert (state.advance(), state.get_bank()) == ([1], 3)
    for token in (1, 2):
        assert state.add(token) == (False, True)
    assert state.inprogress_constraint is not None
    assert state.add(3) == (True, True)
    assert (state.completed, state.advance(), state.get_bank()) == (True, None, 6)
    assert state.add(1) == (True, False)
    assert (len(state.complete_constraints), state.pending_constraints, state.inprogress_constraint) == (2, [], None)


def test_no_constraints_are_refused() -> None:
    with pytest.raises(errors.SettingError, match="constraints"):
        ConstraintListState([])


@settings(max_examples=150)
@given(WORDS, st.lists(TOKENS, max_size=30), st.integers(0, 30))
def test_what_is_complete_is_written(words: list[Any], tokens: list[int], cut: int) -> None:
    state = ConstraintListState(words)
    state.reset(tokens)
    if state.completed:
        for word in words:
            phrases = word.token_ids if isinstance(word, DisjunctiveConstraint) else [word.token_ids]
            assert any(contains(tokens, phrase) for phrase in phrases)
    assert len(state.complete_constraints) + len(state.pending_constraints) + (
        state.inprogress_constraint is not None
    ) == len(words)
    assert 0 <= state.get_bank() <= len(words) * state.max_seqlen
    # One by one, through a copy, and after something else was written: the same.
    first = ConstraintListState(words)
    first.reset([0, 1, 2, 3])
    first.reset(tokens[:cut])
    twin = first.copy()
    before = (first.get_bank(), first.completed, first.advance())
    for token in tokens[cut:]:
        twin.add(token)
    assert (twin.get_bank(), twin.completed, twin.advance()) == (state.get_bank(), state.completed, state.advance())
    assert (first.get_bank(), first.completed, first.advance()) == before
    fresh = twin.copy(stateful=False)
    assert (fresh.get_bank(), fresh.completed, len(fresh.pending_constraints)) == (0, False, len(words))


@given(WORDS)
def test_following_the_advice_completes_everything(words: list[Any]) -> None:
    state = ConstraintListState(words)
    for _ in range(len(words) * state.max_seqlen):
        asked = state.advance()
        if asked is None:
            break
        bank = state.get_bank()
        assert state.add(asked[-1])[1]
        assert state.get_bank() > bank
    assert state.completed
    state.reset(None)
    assert not state.completed and state.get_bank() == 0


# --- what others write ----------------------------------------------------------------------------------


class AnyOrder(Constraint):
    """Some tokens, in any order, with anything in between: what a user might write. Keeps no `seqlen`."""

    def __init__(self, tokens: list[int], missing: list[int] | None = None) -> None:
        self.tokens = tokens
        self.missing = sorted(tokens) if missing is None else list(missing)
        if missing is None:
            super().__init__()

    def advance(self) -> int | list[int] | None:
        return list(self.missing) or None

    def does_advance(self, token_id: int) -> bool:
        return token_id in self.missing

    def update(self, token_id: int) -> tuple[bool, bool, bool]:
        if token_id not in self.missing:
            return False, False, False
        self.missing.remove(token_id)
        return True, not self.missing, False

    def reset(self) -> None:
        self.missing = sorted(self.tokens)

    def remaining(self) -> int:
        return len(self.missing)

    def copy(self, stateful: bool = False) -> AnyOrder:
        return AnyOrder(self.tokens, self.missing if stateful else None)


def test_a_constraint_that_a_user_wrote() -> None:
    constraint = AnyOrder([3, 1])
    constraint.test()
    assert constraint.missing == [1, 3]  # being checked leaves no trace
    state = ConstraintListState([constraint, PhrasalConstraint([7])])
    assert state.max_seqlen == 2
    assert state.advance() == [1, 3, 7]
    for token, bank in ((3, 1), (9, 1), (1, 2), (7, 4)):
        state.add(token)
        assert state.get_bank() == bank
    assert state.completed and constraint.missing == [1, 3]


def broken(**methods: Any) -> Constraint:
    """A constraint for the phrase 1, 2 with some methods written wrongly, not checked when it is made."""

    class Broken(AnyOrder):
        def __init__(self, tokens: list[int], missing: list[int] | None = None) -> None:
            super().__init__(tokens, sorted(tokens) if missing is None else missing)

        def copy(self, stateful: bool = False) -> Broken:
            return Broken(self.tokens, self.missing if stateful else None)

    for name, method in methods.items():
        setattr(Broken, name, method)
    return Broken([1, 2])


def share(self: Any, stateful: bool = False) -> Any:
    twin = type(self)(self.tokens)
    if stateful:
        twin.missing = self.missing  # the one list
    return twin


@pytest.mark.parametrize(
    ("methods", "why"),
    [
        ({"does_advance": lambda self, token: False}, r"does_advance\(advance\(\)\) must be true"),
        ({"advance": lambda self: None}, r"advance\(\) must name a token"),
        ({"advance": lambda self: "12"}, r"advance\(\) must return a token id"),
        ({"update": lambda self, token: (True, False)}, r"must return \(stepped, completed, reset\)"),
        ({"update": lambda self, token: (False, False, False)}, "must make a step"),
        ({"update": lambda self, token: (True, False, False)}, "must complete it"),
        ({"update": lambda self, token: (True, True, False)}, "2 remaining"),
        ({"remaining": lambda self: 3 - len(self.missing)}, "must fall to 0"),
        ({"remaining": lambda self: len(self.missing) + 1}, "1 remaining"),
        ({"reset": lambda self: self.missing.__init__([2])}, "must leave no progress"),
        ({"copy": lambda self, stateful=False: self}, r"copy\(\) must return another"),
        ({"copy": lambda self, stateful=False: type(self)(self.tokens)}, "must keep the progress"),
        ({"copy": lambda self, stateful=False: type(self)(self.tokens, [2])}, "must leave no progress"),
        ({"copy": share}, "must be independent"),
    ],
)
def test_a_broken_constraint_is_told_why(methods: dict[str, Any], why: str) -> None:
    broken().test()
    constraint = broken(**methods)
    with pytest.raises(errors.SettingError, match=why) as caught:
        constraint.test()
    assert "Broken is not well defined" in str(caught.value)


def test_a_constraint_is_checked_when_it_is_made() -> None:
    class Endless(AnyOrder):
        def update(self, token_id: int) -> tuple[bool, bool, bool]:
            return True, False, False

    with pytest.raises(errors.SettingError, match="must complete it"):
        Endless([1, 2])
    with pytest.raises(TypeError, match="abstract"):
        Constraint()


def test_a_state_finds_out_too() -> None:
    state = ConstraintListState([broken(update=lambda self, token: (False, False, False))])
    with pytest.raises(errors.SettingError, match="makes no step"):
        state.add(1)
