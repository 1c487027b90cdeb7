"""Choosing tokens from the logits of steps that are taken several at a time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from unspool.decoding.rows import Rows
from unspool.decoding.tails import choose_token
from unspool.kernels.cpu.library import UNSURE
from unspool.kernels.cpu.mark_calls import NO_MARK, MarkCall
from unspool.kernels.draws import DrawCall, new_draws, prepare_draws
from unspool.logits import LogitsProcessorList
from unspool.logits.fused import FusedTail
from unspool.logits.watermark import WatermarkProcessor
from unspool.protocols import Choose


@dataclass(frozen=True, slots=True)
class ChosenSteps:
    """How the tokens of the next `num_steps` steps are chosen: the likeliest of those that are not forbidden, or by a
    function of all logits."""

    num_steps: int
    forbidden: tuple[int, ...] = ()
    choose: Choose | None = None


class LogitsChoice:
    """Chooses the tokens of up to `num_steps` steps, each from its logits by processors and a draw, as single steps do.

    The rows' histories grow here: the rows themselves get a step's tokens when its turn comes. Draws, and a mark at the
    end of the chain, are calls of the CPU library that lie ready.
    """

    def __init__(
        self, processors: LogitsProcessorList, tail: FusedTail | None, rows: Rows, num_steps: int, *, do_sample: bool
    ) -> None:
        self._processors, self._tail = processors, tail
        self._step = 0
        self._width = max(rows.ends)
        self._pads = None
        if processors:
            self._ids = F.pad(rows.read_history(), (0, num_steps))  # (rows, columns)
            self._numbers = self._ids.numpy()  # the same memory
            self._pads = rows.padding() if processors.takes("pads") else None
        self._has_history = bool(processors)
        self._uniforms, self._own_uniforms = (
            rows.uniforms_from(rows.lengths, num_steps, stream) if is_wanted else None  # (rows, steps)
            for stream, is_wanted in ((0, do_sample), (1, processors.takes("uniforms")))
        )
        self._draws: DrawCall | None = None
        self._plain: np.ndarray[tuple[int, int], np.dtype[np.float64]] | None = None  # (steps, rows): a mark may draw
        if self._uniforms is not None and (tail is None or not tail.after):
            draws = new_draws(len(rows)) if tail is None else tail.list_draws(len(rows))
            self._draws = prepare_draws(draws, self._uniforms)
        ends_marked = bool(processors) and processors.starts is None and isinstance(processors[-1], WatermarkProcessor)
        self._may_mark = do_sample and ends_marked  # how many scores there are is known with the first ones
        self._mark: MarkCall | None = None

    def __call__(self, likeliest: list[int], logits: torch.Tensor) -> list[int]:  # noqa: ARG002 - a `Choose`
        """The rows' tokens of the next step, from its logits (rows, vocab)."""
        if self._may_mark:
            self._prepare_mark(logits.shape[-1])
        columns, drawn = self._width + self._step, None
        scores = self._process(logits)
        if self._mark is not None:
            drawn = self._mark.draw(scores, columns, None if self._plain is None else self._plain[self._step])
            scores = self._mark.mark(scores, columns) if drawn is None else scores
        chosen = drawn
        if chosen is None or NO_MARK in chosen:
            others = self._choose(scores)
            chosen = others if drawn is None else [a if a != NO_MARK else b for a, b in zip(drawn, others, strict=True)]
        if self._has_history:
            self._numbers[:, columns] = [max(token, 0) for token in chosen]
        self._step += 1
        return chosen

    def _prepare_mark(self, vocab: int) -> None:
        """Take the mark off the chain's end, if it can be made ready for all steps."""
        self._may_mark = False
        self._mark = self._processors[-1].prepare_steps(self._ids, vocab, self._pads)
        if self._mark is None:
            return
        self._processors = LogitsProcessorList(self._processors[:-1])
        if self._tail is None and self._uniforms is not None:
            self._plain = np.ascontiguousarray(self._uniforms.double().numpy().T)

    def _choose(self, scores: torch.Tensor) -> list[int]:
        if self._draws is not None and scores.dtype == torch.float32:
            drawn = self._draws.draw(scores, self._step)
            if UNSURE not in drawn:
                return drawn
        uniforms = None if self._uniforms is None else self._uniforms[:, self._step]
        chosen: list[int] = choose_token(scores, uniforms, self._tail).tolist()
        return chosen

    def _process(self, logits: torch.Tensor) -> torch.Tensor:
        if not self._processors:
            return logits
        history = self._ids[:, : self._width + self._step]
        extra = {"host_ids": history}
        if self._pads is not None:
            extra["pads"] = self._pads
        if self._own_uniforms is not None:
            extra["uniforms"] = self._own_uniforms[:, self._step]
        return self._processors(history, logits, **extra)
