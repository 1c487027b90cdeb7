"""One phrase that must be written."""

from __future__ import annotations

from copy import copy as copy_shallowly

from unspool.constraints.base import Constraint
from unspool.constraints.token_ids import check_phrase, check_token


class PhrasalConstraint(Constraint):
    """The output must contain these tokens, one after the other."""

    def __init__(self, token_ids: list[int]) -> None:
        check_phrase("token_ids", token_ids)
        self.token_ids = token_ids
        self.seqlen = len(token_ids)
        self.fulfilled_idx = -1  # the last token of the phrase that is written
        self.completed = False

    def advance(self) -> int | None:
        """The next token of the phrase."""
        return None if self.completed else self.token_ids[self.fulfilled_idx + 1]

    def does_advance(self, token_id: int) -> bool:
        """Whether it is the next token of the phrase."""
        check_token(token_id)
        return not self.completed and token_id == self.token_ids[self.fulfilled_idx + 1]

    def update(self, token_id: int) -> tuple[bool, bool, bool]:
        """Step on with the phrase's next token, or fall back to its beginning."""
        if not self.does_advance(token_id):
            self.reset()
            return False, False, True
        self.fulfilled_idx += 1
        self.completed = self.remaining() == 0
        return True, self.completed, False

    def reset(self) -> None:
        """Go back to before the phrase."""
        self.fulfilled_idx = -1
        self.completed = False

    def remaining(self) -> int:
        """How many tokens of the phrase are not written."""
        return self.seqlen - 1 - self.fulfilled_idx

    def copy(self, stateful: bool = False) -> PhrasalConstraint:
        """The same phrase, with or without the progress."""
        twin = copy_shallowly(self)
        if not stateful:
            twin.reset()
        return twin
