"""How far a constraint is from being complete."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from unspool.constraints.base import Constraint
from unspool.constraints.disjunctive import DisjunctiveConstraint
from unspool.constraints.phrasal import PhrasalConstraint
from unspool.constraints.state import ConstraintListState

MOST_TRIALS = 10_000  # steps tried out on a constraint that someone wrote


def list_phrases(constraint: Constraint) -> list[list[int]] | None:
    """The phrases of which one completes it; None for a constraint that is no list of phrases."""
    if isinstance(constraint, PhrasalConstraint):
        return [constraint.token_ids]
    return constraint.token_ids if isinstance(constraint, DisjunctiveConstraint) else None


def count_fewest_steps(constraint: Constraint, may_write: Callable[[int], bool] = lambda _: True) -> int | None:
    """The fewest tokens that complete it, of those that may be written; None if none do.

    `remaining()` says how many there are at most. Which of the tokens that `advance()` offers is the shortest way is
    found by trying them out on copies; where there is too much to try, `remaining()` is the answer.
    """
    if constraint.remaining() == 0:
        return 0
    waiting = deque([(constraint, 0)])
    num_trials = 0
    while waiting:
        reached, steps = waiting.popleft()
        asked = reached.advance()
        for token in [asked] if isinstance(asked, int) else asked or []:
            if not may_write(token):
                continue
            num_trials += 1
            if num_trials > MOST_TRIALS:
                return constraint.remaining()
            further = reached.copy(stateful=True)
            stepped, completed, _ = further.update(token)
            if completed:
                return steps + 1
            if stepped:
                waiting.append((further, steps + 1))
    return None


def can_complete(state: ConstraintListState, room: int) -> bool:
    """Whether a hypothesis can write all that is missing in `room` tokens."""
    missing = list_missing(state)
    if sum(constraint.remaining() for constraint in missing) <= room:
        return True
    fewest = [count_fewest_steps(constraint) for constraint in missing]
    return sum(room + 1 if steps is None else steps for steps in fewest) <= room


def list_missing(state: ConstraintListState) -> list[Constraint]:
    """The constraints that a hypothesis has yet to complete."""
    begun = state.inprogress_constraint
    return list(state.pending_constraints) if begun is None else [begun, *state.pending_constraints]


def holds(tokens: Sequence[int], phrase: Sequence[int]) -> bool:
    """Whether the phrase stands in the tokens, one after the other."""
    size, wanted = len(phrase), list(phrase)
    return any(list(tokens[start : start + size]) == wanted for start in range(len(tokens) - size + 1))


def describe_constraint(constraint: Constraint) -> str:
    """A constraint in a message: its tokens, or what its author calls it."""
    phrases = list_phrases(constraint)
    if phrases is None:
        return f"a {type(constraint).__name__}"
    return f"{phrases[0]!r:.100}" if len(phrases) == 1 else f"one of {phrases!r:.200}"
