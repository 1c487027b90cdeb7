"""Drawing from a fused tail; on a GPU as one CUDA graph, because there the host's launches cost more than the work."""

from __future__ import annotations

import torch

from unspool.decoding.select import draw
from unspool.logits.fused import FusedTail

STEPS_BEFORE_CAPTURE = 8  # capturing takes some ten milliseconds: a shape must stay for a while
MOST_CAPTURES = 8  # in one call, whose rows leave one by one


def draw_from_tail(tail: FusedTail, scores: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The tokens (rows,) drawn from what the tail leaves of scores (rows, vocab)."""
    candidates = tail.find_candidates(scores)
    if candidates is None:
        return draw(tail.run_plainly(scores), uniforms)
    return draw(candidates[1], uniforms, candidates[0])


class TailDraws:
    """`draw_from_tail` at every step of a call, captured once the same tail has been drawn from for a while."""

    def __init__(self, steps_before_capture: int = STEPS_BEFORE_CAPTURE) -> None:
        self._patience = steps_before_capture
        self._tail: FusedTail | None = None
        self._num_steps = 0
        self._num_captures = 0
        self._captured: CapturedDraw | None = None

    def draw(self, tail: FusedTail, scores: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
        """The tokens (rows,) of one step."""
        if tail is not self._tail:  # rows have left
            self._tail, self._num_steps, self._captured = tail, 0, None
        self._num_steps += 1
        if self._captured is None and self._may_capture(scores):
            self._num_captures += 1
            self._captured = CapturedDraw(tail, scores, uniforms)
        if self._captured is None:
            return draw_from_tail(tail, scores, uniforms)
        return self._captured(scores, uniforms)

    def _may_capture(self, scores: torch.Tensor) -> bool:
        return (
            scores.device.type == "cuda"
            and self._num_steps > self._patience
            and self._num_captures < MOST_CAPTURES
            and not torch.cuda.is_current_stream_capturing()
        )


class CapturedDraw:
    """`draw_from_tail` for one shape as a CUDA graph: its inputs are copied in, its tokens copied out."""

    def __init__(self, tail: FusedTail, scores: torch.Tensor, uniforms: torch.Tensor) -> None:
        self._scores, self._uniforms = scores.clone(), uniforms.clone()
        draw_from_tail(tail, self._scores, self._uniforms)  # what torch sets up once must not be captured
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._tokens = draw_from_tail(tail, self._scores, self._uniforms)

    def __call__(self, scores: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
        """The tokens (rows,)."""
        self._scores.copy_(scores)
        self._uniforms.copy_(uniforms)
        self._graph.replay()
        return self._tokens.clone()
