"""Greedy search and multinomial sampling: one token a row a step."""

from __future__ import annotations

from unspool.decoding.randomness import draw_uniform
from unspool.decoding.rows import Rows
from unspool.decoding.select import draw, take_likeliest
from unspool.decoding.step import Step
from unspool.decoding.strategy import Choice


class Sample:
    """Takes the likeliest token, or draws one from the processed distribution."""

    def __init__(self, step: Step, *, do_sample: bool) -> None:
        self._step = step
        self._do_sample = do_sample

    def step(self, rows: Rows) -> Choice:
        """Choose every row's next token."""
        result = self._step.next_logits(rows)
        if self._do_sample:
            tokens = draw(result.scores, draw_uniform(rows.seeds, rows.positions()))
        else:
            tokens = take_likeliest(result.scores)
        return Choice(tokens[:, None], result.logits)

    def keep_rows(self, index: list[int]) -> None:
        """Let the step follow rows that stay."""
        self._step.keep_rows(index)
