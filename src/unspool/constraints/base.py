"""The contract of a constraint, and whether one that somebody wrote keeps it."""

from __future__ import annotations

from abc import ABC, abstractmethod

from unspool.errors import SettingError

MOST_STEPS = 10_000


class Constraint(ABC):
    """Something that the output must contain, which a beam fulfils token by token.

    Feeding `update` with what `advance` asks for must complete it in a finite number of steps. A subclass that calls
    `super().__init__()` when its own attributes are set is checked for that there; `test()` checks the whole contract.
    """

    def __init__(self) -> None:
        _check_completion(self)
        self.reset()

    @abstractmethod
    def advance(self) -> int | list[int] | None:
        """The token, or the tokens to choose from, that bring this one step closer; None when there is none."""

    @abstractmethod
    def does_advance(self, token_id: int) -> bool:
        """Whether the token would bring this one step closer; changes nothing."""

    @abstractmethod
    def update(self, token_id: int) -> tuple[bool, bool, bool]:
        """Take a token that was written: (it was a step, it completed this, it threw the progress away)."""

    @abstractmethod
    def reset(self) -> None:
        """Go back to no progress."""

    @abstractmethod
    def remaining(self) -> int:
        """How many steps are left at most."""

    @abstractmethod
    def copy(self, stateful: bool = False) -> Constraint:
        """A constraint of its own, with this one's progress (`stateful`) or with none."""

    def test(self) -> None:
        """Raise a SettingError that names what the constraint does wrong; leaves it reset."""
        _check_resetting(self)
        _check_completion(self)
        self.reset()


def _check_completion(constraint: Constraint) -> None:
    """Follow `advance` until `update` says that the constraint is complete, and raise where that can't be done."""
    for _ in range(MOST_STEPS):
        tokens = _read_advance(constraint)
        if not tokens or _step(constraint, tokens):  # no tokens: it may have been complete before the first step
            break
    else:
        raise _broken(constraint, f"update(advance()) must complete it, but has not after {MOST_STEPS} steps")
    if constraint.remaining() != 0:
        raise _broken(
            constraint,
            f"advance() must name a token until remaining() is 0, but there is nothing left to do "
            f"with {constraint.remaining()} remaining",
        )


def _check_resetting(constraint: Constraint) -> None:
    """Raise unless `reset` and both kinds of `copy` do what they say; leaves the constraint reset."""
    constraint.reset()
    first_tokens, first_remaining = _read_advance(constraint), constraint.remaining()
    if not first_tokens:
        raise _broken(constraint, "advance() must name a token after reset(), but named none")
    _step(constraint, first_tokens)
    remaining = constraint.remaining()

    twin, fresh = _copy(constraint, stateful=True), _copy(constraint, stateful=False)
    if twin.remaining() != remaining:
        raise _broken(
            constraint,
            f"copy(stateful=True) must keep the progress, but remaining() is {twin.remaining()} in the copy "
            f"and {remaining} in the original",
        )
    _check_completion(twin)
    if constraint.remaining() != remaining:
        raise _broken(constraint, "copy(stateful=True) must be independent, but stepping it moved the original")

    constraint.reset()
    tokens, remaining = _read_advance(fresh), fresh.remaining()
    if tokens != first_tokens or remaining != first_remaining or constraint.remaining() != first_remaining:
        raise _broken(
            constraint,
            "reset() and copy() must leave no progress, but they don't leave the same: "
            f"after reset() advance() is {first_tokens} and remaining() {first_remaining}, "
            f"in the copy they are {tokens} and {remaining}",
        )


def _step(constraint: Constraint, tokens: list[int]) -> bool:
    """Take the first of the tokens, all of which must advance; whether that completed the constraint."""
    for token in tokens:
        if not constraint.does_advance(token):
            raise _broken(constraint, f"does_advance(advance()) must be true, but is not for token {token}")
    before = constraint.remaining()
    answer = constraint.update(tokens[0])
    if not isinstance(answer, tuple) or len(answer) != 3:
        raise _broken(constraint, f"update() must return (stepped, completed, reset), but returned {answer!r:.200}")
    stepped, completed, was_reset = answer
    if not stepped or was_reset:
        raise _broken(
            constraint,
            f"update() must make a step with a token that does_advance() accepts, but token {tokens[0]} gave "
            f"(stepped, completed, reset) = {answer}",
        )
    if not 0 <= constraint.remaining() <= before:
        raise _broken(
            constraint, f"remaining() must fall to 0, but a step took it from {before} to {constraint.remaining()}"
        )
    return bool(completed)


def _read_advance(constraint: Constraint) -> list[int]:
    asked = constraint.advance()
    tokens = [] if asked is None else list(asked) if isinstance(asked, (list, tuple)) else [asked]
    if any(not isinstance(token, int) for token in tokens):
        raise _broken(
            constraint, f"advance() must return a token id, a list of them or None, but returned {asked!r:.200}"
        )
    return tokens


def _copy(constraint: Constraint, stateful: bool) -> Constraint:
    twin = constraint.copy(stateful=stateful)
    if twin is constraint or not isinstance(twin, type(constraint)):
        raise _broken(constraint, f"copy() must return another {type(constraint).__name__}, but returned {twin!r:.200}")
    return twin


def _broken(constraint: Constraint, why: str) -> SettingError:
    return SettingError(f"The constraint {type(constraint).__name__} is not well defined: {why}.")
