"""Choosing tokens from the logits of steps that are taken several at a time."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from unspool.decoding.rows import Rows
from unspool.decoding.select import draw, take_likeliest
from unspool.decoding.tails import draw_from_tail
from unspool.logits import LogitsProcessorList
from unspool.logits.fused import FusedTail


class LogitsChoice:
    """Chooses the tokens of up to `num_steps` steps, each from its logits by processors and a draw, as single steps do.

    The rows' histories grow here: the rows themselves get a step's tokens when its turn comes.
    """

    def __init__(
        self, processors: LogitsProcessorList, tail: FusedTail | None, rows: Rows, num_steps: int, *, do_sample: bool
    ) -> None:
        self._processors, self._tail = processors, tail
        self._step = 0
        self._width = max(rows.ends)
        if processors:
            self._ids = F.pad(rows.read_history(), (0, num_steps))  # (rows, columns)
            self._pads = rows.padding() if processors.takes("pads") else None
        self._uniforms, self._own_uniforms = (
            rows.uniforms_from(rows.lengths, num_steps, stream) if is_wanted else None  # (rows, steps)
            for stream, is_wanted in ((0, do_sample), (1, processors.takes("uniforms")))
        )

    def __call__(self, likeliest: list[int], logits: torch.Tensor) -> list[int]:  # noqa: ARG002 - a `Choose`
        """The rows' tokens of the next step, from its logits (rows, vocab)."""
        scores = self._process(logits)
        if self._uniforms is None:
            tokens = take_likeliest(scores)
        elif self._tail is None:
            tokens = draw(scores, self._uniforms[:, self._step])
        else:
            tokens = draw_from_tail(self._tail, scores, self._uniforms[:, self._step])
        if self._processors:
            self._ids[:, self._width + self._step] = tokens.clamp(min=0)
        self._step += 1
        chosen: list[int] = tokens.tolist()
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
