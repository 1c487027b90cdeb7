"""How many tokens to draft: fixed, following what was accepted, or weighed against what it costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from unspool.plan.drafting import Schedule


@dataclass(frozen=True, slots=True)
class CheckedTurn:
    """What one turn did and cost."""

    drafted: list[int]  # guesses, one per row
    accepted: list[int]
    num_live: int  # rows that were not done
    num_tokens: int  # emitted, all rows together
    draft_seconds: float
    check_seconds: float
    reads_prompt: bool = False  # its pass is none that a draft could have saved


class Policy(Protocol):
    """Says how long drafts are to be."""

    def rests(self) -> bool:
        """Whether this turn goes by without a look at what could be drafted, and without being measured."""
        ...

    @property
    def num_resting(self) -> int:
        """How many turns more are certain to rest."""
        ...

    def choose(self, limits: Sequence[int]) -> list[int]:
        """The guesses to ask a drafter for, one per row, where at most `limits` can help."""
        ...

    def trim(self, counts: Sequence[int], num_live: int) -> list[int]:
        """How many of the guesses that came are worth a check, one per row."""
        ...

    def observe(self, turn: CheckedTurn) -> None:
        """Hear how a turn went."""
        ...


class Scheduled:
    """The reference's schedules: a number of guesses that stays, or goes up by 2 and down by 1 with success."""

    def __init__(self, num_tokens: int, schedule: Schedule = "constant") -> None:
        self.num_tokens = num_tokens
        self._moves = schedule != "constant"

    def rests(self) -> bool:
        """Never."""
        return False

    @property
    def num_resting(self) -> int:
        """None."""
        return 0

    def choose(self, limits: Sequence[int]) -> list[int]:
        """As many as the schedule says."""
        return [min(limit, self.num_tokens) for limit in limits]

    def trim(self, counts: Sequence[int], num_live: int) -> list[int]:  # noqa: ARG002 - the protocol's
        """All of them."""
        return list(counts)

    def observe(self, turn: CheckedTurn) -> None:
        """Draft more after a draft that was right to its end, and less after another; one number for all rows.

        The prompt's turn counts, with or without a draft: the reference drafts in it, and counts its last turn, which
        has no room for a draft, in return.
        """
        if self._moves and (turn.reads_prompt or any(turn.drafted)):
            is_right = all(a == d for a, d in zip(turn.accepted, turn.drafted, strict=True))
            self.num_tokens = self.num_tokens + 2 if is_right else max(1, self.num_tokens - 1)
