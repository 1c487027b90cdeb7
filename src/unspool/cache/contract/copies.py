"""Copies of a cache, in this process and in others."""

from __future__ import annotations

import copy
from typing import Any, Self, cast

import torch

from unspool.cache.files import Savable


class Copyable(Savable):
    """A cache as a value: it can be cloned, pickled and put back to what a clone holds."""

    def __copy__(self) -> Self:
        made = type(self).__new__(type(self))
        made.__dict__.update(cast("dict[str, Any]", self.__getstate__()))
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__dict__.update(copy.deepcopy(cast("dict[str, Any]", self.__getstate__()), memo))
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        """A pickle holds copies of what a file would hold: torch's own pickler shares the memory it is given, and two
        processes would write into it."""
        facts, tensors = self._pack()
        return _restore, (
            type(self),
            facts,
            {name: held.detach().clone() for name, held in tensors.items()},
            self.lengths,
        )

    def clone(self) -> Self:
        """A cache that holds the same and goes its own way from here."""
        return copy.deepcopy(self)

    def return_to(self, copied: Copyable) -> None:
        """Become what a clone holds, which must not be used any more."""
        self.__dict__.update(copied.__dict__)


def _restore(kind: type[Copyable], facts: dict[str, Any], tensors: dict[str, torch.Tensor], lengths: list[int]) -> Any:
    return kind._unpack(facts, tensors, lengths)
