"""Rows that roll back, leave, are repeated, are reordered and join."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Final, Self

import torch

from unspool.cache.contract.capabilities import JOIN, ROLL_BACK, SELECT_ROWS, TRIAL, Capable
from unspool.cache.contract.copies import Copyable
from unspool.errors import SettingError

BEAMS_LEFT: Final = (
    "past_key_values are what a beam search left: their rows are the beams of its last step, and what it "
    "returned had ended before or stands in another order; pass the whole text without them, or choose the rows first "
    "(cache.select_rows(…), or batch_select_indices(…) of transformers' caches)"
)


class RowChanges(Copyable, Capable):
    """What can be done with the rows of a cache between two passes."""

    rolls_back_exactly: bool = True  # a row that is rolled back holds what it held then, bit by bit
    beams_left: tuple[int, ...] | None = None  # the lengths of its rows, if a beam search left them as its last beams
    texts_held: list[list[int]] | None = None  # the tokens of its rows as the last call left them, where they are known

    # --- going back --------------------------------------------------------------------------------------
    def truncate(self, lengths: Sequence[int]) -> None:
        """Roll every row back to the given length."""
        self.require(ROLL_BACK)
        self._check_lengths(lengths)
        self.lengths = list(lengths)

    def _check_lengths(self, lengths: Sequence[int]) -> None:
        if len(lengths) != len(self.lengths) or any(
            not 0 <= new <= held for new, held in zip(lengths, self.lengths, strict=True)
        ):
            raise SettingError(f"can't roll back from lengths {self.lengths} to {list(lengths)}")

    def begin_trial(self) -> None:
        """Keep from now on what it takes to roll every row back to any length it gets to; `truncate` ends the trial.

        Speculation writes drafts that may be refused. Where positions are kept, there is nothing to do; a kind that
        overwrites or folds them (a ring, a state, packed blocks) remembers them here and declares `TRIAL`.
        """
        if ROLL_BACK not in self.can:
            self.require(TRIAL)

    @property
    def is_trying(self) -> bool:
        """Whether a trial has begun that keeps what its passes write over."""
        return False

    def put_aside(self, rows: Sequence[int]) -> None:
        """Remember rows that have ended and go on as padding, so that `take_back` returns them to where they are now.

        Nothing to do if a row can be rolled back.
        """

    def take_back(self) -> None:
        """Return the rows that were put aside to where they were then."""

    # --- other rows, and another order -------------------------------------------------------------------
    def select_rows(self, index: Sequence[int]) -> None:
        """Keep, repeat or reorder rows: row `i` becomes what row `index[i]` was."""
        self.require(SELECT_ROWS)
        self.beams_left = self.texts_held = None
        if not self.lengths or list(index) == list(range(len(self.lengths))):
            return  # nothing held yet, or nothing moves
        self._select_listed(index)
        self.lengths = [self.lengths[i] for i in index]

    @property
    def can_follow(self) -> bool:
        """Whether `follow_rows` moves rows without a look at the index, which is on the device."""
        return False

    def follow_rows(self, index: torch.Tensor) -> None:
        """`select_rows` for beams, which go on from others of their prompt: an index (rows,) on the device."""
        self.select_rows(index.tolist())

    # --- rows of several caches --------------------------------------------------------------------------
    def take_rows(self, index: Sequence[int]) -> Self:
        """A cache of the same kind that holds what some of the rows do, and goes its own way from here."""
        self.require(JOIN)
        part = self.clone()
        part.select_rows(list(index))
        return part

    def join(self, other: Any) -> None:
        """Take in the rows of another cache of the same kind, after its own; the other keeps what it holds.

        Raises and changes nothing if there is no room for them, or one of the two is in a trial.
        """
        self.require(JOIN)
        if type(other) is not type(self):
            raise SettingError(f"the rows of a {type(other).__name__} can't join those of a {type(self).__name__}")
        if self.is_trying or other.is_trying:
            raise SettingError("rows can't join while tokens are tried; end the trial with truncate() first")
        if other.lengths:
            self._check_rows(len(self.lengths) + len(other.lengths))
            self._join(other)
            self.lengths = [*self.lengths, *other.lengths]

    def _join(self, other: Any) -> None:
        """Store the rows of another cache, which has some, after its own."""
        raise NotImplementedError(f"{type(self).__name__} says that it can join rows")

    # --- what it stands on -------------------------------------------------------------------------------
    @abstractmethod
    def _select(self, index: torch.Tensor) -> None:
        """Reorder the stored rows."""

    def _select_listed(self, index: Sequence[int]) -> None:
        """The same by an index on the host."""
        self._select(torch.tensor(list(index), dtype=torch.int64))

    def _check_rows(self, rows: int) -> None:
        """Raise if more rows come than memory was taken for."""
