"""What strategies are made from, and a base for those that choose one token per row and turn."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch

from unspool.decoding.finish import Finish
from unspool.decoding.rows import Rows
from unspool.decoding.scorer import Scorer
from unspool.decoding.strategies.base import Chosen
from unspool.decoding.strategies.candidates import Candidates
from unspool.errors import NoTokenLeftError
from unspool.plan import Plan


@dataclass(frozen=True, slots=True)
class StrategyContext:
    """What a strategy is made from."""

    scorer: Scorer
    rows: Rows
    finish: Finish
    plan: Plan
    candidates: Candidates | None = None  # of contrastive search
    shows_table: bool = False  # every step returns the whole table of beams
    rows_may_leave: bool = False  # nothing is kept of rows that have ended


class TokenStrategy(ABC):
    """Chooses one token per row from the processed scores; a plug-in's strategy derives from it.

    Batches, streams, processors, stops and rows that leave are taken care of. A strategy that holds something per row
    follows the rows in `keep_rows`.
    """

    reads_choice = False  # the model reads its tokens at the next step
    can_forget = False  # its tokens may be chosen on the host, so no step is launched ahead

    def __init__(self, context: StrategyContext) -> None:
        self.scorer, self.plan = context.scorer, context.plan

    @abstractmethod
    def choose(self, rows: Rows, scores: torch.Tensor) -> torch.Tensor:
        """The next token of every row, (rows,), from the processed scores (rows, vocab)."""

    def step(self, rows: Rows) -> Chosen:
        """One turn: read, process, choose."""
        result = self.scorer.next_logits(rows)
        return Chosen(self.choose(rows, result.scores)[:, None], result.logits)

    def forget(self, num_steps: int) -> None:
        """Undo the last steps, which no turn asks of it."""
        raise NotImplementedError

    def retake(self, rows: Rows) -> None:
        """Take the last step again, which no turn asks of it."""
        raise NotImplementedError

    def keep_rows(self, index: list[int]) -> None:
        """Follow the rows that stay when others leave: row `i` is what row `index[i]` was."""
        self.scorer.keep_rows(index)

    def admit(self, *_: Any) -> None:
        """Not unless a strategy says how its own rows and another's go on together."""
        raise ValueError(f"rows of {type(self).__name__} are stepped by their own call")

    def explain_no_token(self, rows: Rows, place: int) -> NoTokenLeftError:
        """Why the row at `place` has no token to choose from."""
        return self.scorer.explain_no_token(rows, place)
