"""How far one hypothesis has come with a list of constraints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from unspool.constraints.base import Constraint
from unspool.constraints.token_ids import check_token
from unspool.errors import SettingError


class ConstraintListState:
    """The constraints of one hypothesis: complete, in progress (one at most) and pending.

    The bank of Post and Vilar, 2018 (https://arxiv.org/abs/1804.06609): what `get_bank` counts.
    """

    def __init__(self, constraints: Sequence[Constraint]) -> None:
        if not constraints:
            raise SettingError("`constraints` must name at least one Constraint, but is empty.")
        self.constraints = constraints  # never stepped: what is in here begins every new state
        self.max_seqlen = max(_count_steps(constraint) for constraint in constraints)
        self.n_constraints = len(constraints)
        self.init_state()

    def init_state(self) -> None:
        """Go back to where no token is written."""
        self.complete_constraints: list[Constraint] = []
        self.inprogress_constraint: Constraint | None = None
        self.pending_constraints = [constraint.copy(stateful=False) for constraint in self.constraints]
        self.completed = False

    def get_bank(self) -> int:
        """The progress as one number: `max_seqlen` for each complete constraint, and the steps of the one begun."""
        bank = len(self.complete_constraints) * self.max_seqlen
        if self.inprogress_constraint is not None:
            bank += self.max_seqlen - self.inprogress_constraint.remaining()
        return bank

    def advance(self) -> list[int] | None:
        """The tokens that make a step: of the constraint in progress, else of all that are pending."""
        open_constraints = (
            self.pending_constraints if self.inprogress_constraint is None else [self.inprogress_constraint]
        )
        tokens: list[int] = []
        for constraint in open_constraints:
            asked = constraint.advance()
            if isinstance(asked, int):
                tokens.append(asked)
            elif asked is not None:
                tokens.extend(asked)
        return tokens or None

    def reset(self, token_ids: Iterable[int] | None) -> None:
        """Begin again, as if exactly these tokens had been written."""
        self.init_state()
        for token in token_ids or ():
            self.add(token)
            if self.completed:
                break

    def add(self, token_id: int) -> tuple[bool, bool]:
        """Take a token that was written: (it completed a constraint, or all were complete; it made a step)."""
        check_token(token_id)
        if self.completed:
            return True, False
        if self.inprogress_constraint is None:
            return self._begin(token_id)
        return self._go_on(self.inprogress_constraint, token_id)

    def copy(self, stateful: bool = True) -> ConstraintListState:
        """The same constraints, with or without the progress."""
        twin = ConstraintListState.__new__(ConstraintListState)
        twin.constraints = self.constraints
        twin.max_seqlen = self.max_seqlen
        twin.n_constraints = self.n_constraints
        if not stateful:
            twin.init_state()
            return twin
        begun = self.inprogress_constraint
        twin.complete_constraints = [constraint.copy(stateful=True) for constraint in self.complete_constraints]
        twin.inprogress_constraint = None if begun is None else begun.copy(stateful=True)
        twin.pending_constraints = [constraint.copy(stateful=False) for constraint in self.pending_constraints]
        twin.completed = self.completed
        return twin

    def _go_on(self, begun: Constraint, token_id: int) -> tuple[bool, bool]:
        """Take a token where a constraint is in progress: no other one is looked at until it is done with."""
        stepped, complete, was_reset = begun.update(token_id)
        if complete:
            self.complete_constraints.append(begun)
        elif was_reset:
            # To the end of the list: two phrases with the same first token get their turns.
            self.pending_constraints.append(begun.copy(stateful=False))
        if complete or was_reset:
            self.inprogress_constraint = None
        self._note_completion()
        return complete, stepped

    def _begin(self, token_id: int) -> tuple[bool, bool]:
        """Take a token where no constraint is in progress: the first that it advances is begun, and only that one."""
        for position, constraint in enumerate(self.pending_constraints):
            if not constraint.does_advance(token_id):
                continue
            stepped, complete, _ = constraint.update(token_id)
            if not stepped:
                raise SettingError(
                    f"The constraint {type(constraint).__name__} is not well defined: update({token_id}) makes no "
                    f"step, though does_advance({token_id}) is true. `Constraint.test()` checks a constraint."
                )
            del self.pending_constraints[position]
            if complete:
                self.complete_constraints.append(constraint)
            else:
                self.inprogress_constraint = constraint
            self._note_completion()
            return complete, stepped
        return False, False

    def _note_completion(self) -> None:
        self.completed = not self.pending_constraints and self.inprogress_constraint is None


def _count_steps(constraint: Constraint) -> int:
    """The steps a constraint takes at most; one that a user wrote need not keep the number as `seqlen`."""
    steps = getattr(constraint, "seqlen", None)
    return int(constraint.copy(stateful=False).remaining() if steps is None else steps)
