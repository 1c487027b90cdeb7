"""What a drafter is: something that guesses a row's next tokens, for the model to check in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from unspool.decoding.rows import Rows
from unspool.kernels.sending import send

# Independent numbers for one position, beside those that plain decoding takes (0: the draw, 1: the processors).
ACCEPT_STREAM = 2
DRAFT_STREAM = 3


@dataclass(slots=True)
class Draft:
    """Guesses for every row: right-filled, each row with its own number of them."""

    tokens: torch.Tensor  # (rows, drafts) int64
    counts: list[int]  # how many of them are each row's; 0 if there is no guess
    # What the tokens were drawn from, (rows, drafts, vocab) probabilities; None if each was the only choice.
    distributions: torch.Tensor | None = None

    @classmethod
    def of(cls, guesses: Sequence[Sequence[int]], device: torch.device) -> Draft:
        """A draft from lists of tokens, one per row."""
        counts = [len(guess) for guess in guesses]
        width = max(counts, default=0)
        if not width:
            return cls(torch.empty(len(counts), 0, dtype=torch.int64, device=device), counts)
        filled = [token for guess in guesses for token in (*guess, *[0] * (width - len(guess)))]
        return cls(send(filled, device).view(len(counts), width), counts)

    @classmethod
    def empty(cls, rows: Rows) -> Draft:
        """No guess for any row."""
        return cls(torch.empty(len(rows), 0, dtype=torch.int64, device=rows.device), [0] * len(rows))

    def cut(self, most: Sequence[int]) -> Draft:
        """The draft with at most so many tokens, one per row."""
        counts = [min(count, limit) for count, limit in zip(self.counts, most, strict=True)]
        width = max(counts, default=0)
        q = self.distributions
        return Draft(self.tokens[:, :width], counts, None if q is None else q[:, :width])


class Drafter(Protocol):
    """Guesses tokens, and follows the rows. What it guesses changes how fast the output comes, never what it is.

    A draft is of one of two kinds. A point mass (no distributions): the model chooses as it would without a drafter,
    and the guess is accepted where it is what was chosen. Drawn tokens come with the distributions that they were
    drawn from; draw them with numbers of `DRAFT_STREAM` at the tokens' positions, which nothing else looks at.
    """

    is_free: bool  # guessing costs next to nothing beside a forward pass

    def propose(self, rows: Rows, limits: Sequence[int]) -> Draft:
        """Guess the tokens after each row's last, at most `limits[row]`; rows with 0 are not to be looked at.

        The rows are as they were when it returns. A drafter that reads rows with a model of its own reads here
        whatever it has not seen of them.
        """
        ...

    def observe(self, rows: Rows, draft: Draft, accepted: Sequence[int]) -> None:
        """Hear how many of each row's guesses were accepted; the rows have their new tokens already.

        It is called after every pass, with an empty draft after one without guesses. The guesses after the accepted
        ones are wrong (or come after a stop), so caches must forget them here.
        """
        ...

    def keep_rows(self, index: Sequence[int]) -> None:
        """Follow the rows that stay when others leave: row `i` is what row `index[i]` was."""
        ...


@runtime_checkable
class SharedDrafter(Drafter, Protocol):
    """A drafter that takes in the rows of others of its kind."""

    def admit(self, others: Sequence[Any]) -> None:
        """Take in other drafters' rows, after these."""
        ...
