"""Several rows over one copy of keys: candidates after a row, beams of a prompt; passes over some rows at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

import torch

from unspool.cache.contract.capabilities import BRANCH, DIVIDE, FORK, Capable

ViewT = TypeVar("ViewT", bound=Capable)


class SharedRows(Capable, Generic[ViewT]):
    """Views of a cache, caches themselves, which write into its keys."""

    num_forks: int = 1  # rows of a pass that read the keys of one row held here
    first_fork: int | None = None  # the number of the first of them; None: this is no view of forks

    def fork(self, forks: range) -> ViewT:
        """A view for one pass in which every row is followed by `len(forks)` tokens, each seeing the row and itself.

        The view's rows are the forks of the first row, then those of the second. Several views with other numbers in
        `forks` may be read one after the other; then `keep_fork` takes one fork of each row over. Changes no length.
        """
        self.require(FORK)
        raise NotImplementedError(f"{type(self).__name__} says that it can fork")

    def keep_fork(self, chosen: torch.Tensor) -> None:
        """Let every row grow by its fork `chosen[row]`, a number out of the views' `forks`."""
        self.require(FORK)
        raise NotImplementedError(f"{type(self).__name__} says that it can fork")

    def branch(self, num_branches: int) -> ViewT:
        """A cache in which every row goes on in `num_branches` rows over one copy of its keys; it owns this one."""
        self.require(BRANCH)
        raise NotImplementedError(f"{type(self).__name__} says that it can branch")

    def divide(self, num_parts: int, num_new: int) -> list[ViewT]:
        """Caches over every `num_parts`-th row, with room for `num_new` positions, that write into this one's keys.

        A pass is run over each of them, and `rejoin` ends the division.
        """
        self.require(DIVIDE)
        raise NotImplementedError(f"{type(self).__name__} says that it can divide rows")

    def rejoin(self, parts: Sequence[ViewT]) -> None:
        """Take over the lengths of the parts, now that each has had its pass."""
        self.lengths = [length for rows in zip(*(part.lengths for part in parts), strict=True) for length in rows]
