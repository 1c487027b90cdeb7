"""Greedy search and multinomial sampling: one token per row per step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from unspool.cache import ROLL_BACK, UNDO, Cache
from unspool.decoding.rows import Joining, Rows
from unspool.decoding.scorer import Scorer
from unspool.decoding.strategies.base import Chosen
from unspool.decoding.strategies.choosing import ChosenSteps, LogitsChoice
from unspool.decoding.strategies.pass_choice import PassChoices
from unspool.decoding.stretching import launch_steps, takes_stretches
from unspool.decoding.tails import choose_token
from unspool.errors import NoTokenLeftError


class Sample:
    """Takes the likeliest token, or draws one from the processed distribution."""

    reads_choice = False

    def __init__(self, scorer: Scorer, *, do_sample: bool) -> None:
        self.scorer = scorer
        self._do_sample = do_sample
        self._choices = PassChoices(scorer, do_sample=do_sample)

    def step(self, rows: Rows) -> Chosen:
        """Choose every row's next token."""
        result = self.scorer.next_logits(rows, whole=not self._do_sample)
        if result.likeliest is not None and not self._do_sample:
            return Chosen(result.likeliest[:, None], result.logits)
        tokens = choose_token(result.scores, rows.uniforms() if self._do_sample else None, result.tail)
        return Chosen(tokens[:, None], result.logits)

    def launch(self, rows: Rows, num_steps: int) -> torch.Tensor | None:
        """What the next steps choose (steps, rows), launched together; None if they must be taken one by one."""
        scorer = self.scorer
        if scorer.reader.is_fresh or not (scorer.can_choose and takes_stretches(scorer.reader)):
            return None
        num_steps, choice = self._choices.find(rows, num_steps)
        return launch_steps(scorer.reader, rows, num_steps, choice)

    def start_choosing(self, rows: Rows, num_steps: int) -> ChosenSteps:
        """How the tokens of up to `num_steps` steps are chosen."""
        scorer = self.scorer
        if not self._do_sample:
            same, forbidden = scorer.find_forbidden_ahead(rows, num_steps)
            if forbidden is not None:
                return ChosenSteps(same, forbidden)
            start = getattr(scorer.processors[0], "start_choosing", None)
            if len(scorer.processors) == 1 and start is not None:  # a grammar's, which needs few masks
                return ChosenSteps(num_steps, choose=start(rows.read_history()))
        processors, tail = scorer.divide(whole=not self._do_sample)
        return ChosenSteps(num_steps, choose=LogitsChoice(processors, tail, rows, num_steps, do_sample=self._do_sample))

    @property
    def can_forget(self) -> bool:
        """Whether the cache can give up its last positions, or at least the last one."""
        return bool({ROLL_BACK, UNDO} & self.scorer.reader.cache.can)

    def forget(self, num_steps: int) -> None:
        """Undo the last steps; only one if the cache can't go back further."""
        self.scorer.forget(num_steps)

    def retake(self, rows: Rows) -> None:
        """Take the last step again."""
        rows.drop(1)
        if ROLL_BACK in self.scorer.reader.cache.can:
            self.forget(1)
            self.step(rows)

    def keep_rows(self, index: list[int]) -> None:
        """Let cache and processors follow rows that stay."""
        self.scorer.keep_rows(index)

    def admit(self, others: Sequence[Any], cache: Cache, joining: Joining) -> None:
        """Take in rows that are chosen in the same way."""
        if not all(isinstance(one, Sample) and one._do_sample == self._do_sample for one in others):
            raise ValueError("rows of which some are drawn and others are not can't be chosen by one strategy")
        self.scorer.admit([one.scorer for one in others], cache, joining)

    def explain_no_token(self, rows: Rows, place: int) -> NoTokenLeftError:
        """Why the row at `place` has no token to choose from."""
        return self.scorer.explain_no_token(rows, place)
