"""The contract of a constraint."""

from __future__ import annotations

from abc import ABC, abstractmethod

from unspool.constraints.contract import check_completion, check_resetting


class Constraint(ABC):
    """Something that the output must contain, which a beam fulfils token by token.

    Feeding `update` with what `advance` asks for must complete it in a finite number of steps. A subclass that calls
    `super().__init__()` when its own attributes are set is checked for that there; `test()` checks the whole contract.
    """

    def __init__(self) -> None:
        check_completion(self)
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
        check_resetting(self)
        check_completion(self)
        self.reset()
