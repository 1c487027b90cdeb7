"""What a strategy of one token per row is: something that chooses tokens by the scores of a `Scorer`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from unspool.cache import Cache
from unspool.decoding.rows import Joining, Rows
from unspool.decoding.scorer import Scorer
from unspool.errors import NoTokenLeftError


@dataclass(slots=True)
class Chosen:
    """The tokens that a step chose, and the logits they were chosen from."""

    tokens: torch.Tensor  # (rows, new)
    logits: torch.Tensor  # (rows, vocab): the model's own, for log-probabilities


class Strategy(Protocol):
    """Chooses the next tokens of every row."""

    def step(self, rows: Rows) -> Chosen:
        """One turn: choose tokens for every row."""
        ...

    @property
    def reads_choice(self) -> bool:
        """Whether the tokens it chooses have been read when it returns them."""
        ...

    @property
    def can_forget(self) -> bool:
        """Whether `forget` can undo a step, and no step waits for the host."""
        ...

    def forget(self, num_steps: int) -> None:
        """Undo the last steps; the rows still have their tokens."""
        ...

    def retake(self, rows: Rows) -> None:
        """Take the last step again, whose tokens the rows still have, so that `explain_no_token` can say what it left.

        Steps after it have been undone.
        """
        ...

    def keep_rows(self, index: list[int]) -> None:
        """Follow the rows that stay when others leave."""
        ...

    @property
    def scorer(self) -> Scorer:
        """What scores the next tokens."""
        ...

    def admit(self, others: Sequence[Any], cache: Cache, joining: Joining) -> None:
        """Take in the rows of other strategies of the kind; raises if they can't go on as one. `cache` holds the
        keys of all."""
        ...

    def explain_no_token(self, rows: Rows, place: int) -> NoTokenLeftError:
        """Why the row at `place` got no token (NO_TOKEN) from the step just taken."""
        ...
