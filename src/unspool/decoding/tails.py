"""Drawing from a fused tail: on a GPU in two kernels, on a CPU in one call of its library, or operator by operator."""

from __future__ import annotations

import torch

from unspool.decoding.select import draw
from unspool.kernels.cpu.library import UNSURE
from unspool.kernels.draws import draw_rows
from unspool.kernels.presence import runs_kernels
from unspool.logits.fused import FusedTail

MOST_RANKED = 256  # candidates that kernels rank by comparing each with each: 1,000 take three times what a sort takes


def draw_from_tail(tail: FusedTail, scores: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The tokens (rows,) drawn from what the tail leaves of scores (rows, vocab)."""
    if scores.device.type == "cpu":
        return draw_by_library(tail, scores, uniforms)
    is_ranked = tail.can_be_ranked and tail.top_k is not None and tail.top_k.largest <= MOST_RANKED
    if is_ranked and scores.dtype == torch.float32 and runs_kernels(scores.device):
        return draw_by_kernels(tail, scores, uniforms)
    return draw_by_operators(tail, scores, uniforms)


def draw_by_library(tail: FusedTail, scores: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The same on a CPU; if rounding decides, something cuts after min-p, or without its library, operators do."""
    if tail.after:
        return draw(tail.run_plainly(scores), uniforms)
    tokens = draw_rows(scores, tail.list_draws(len(scores)), uniforms)
    if tokens is None:
        return draw_by_operators(tail, scores, uniforms)
    is_open = tokens == UNSURE
    if bool(is_open.any()):
        rows = is_open.nonzero().squeeze(-1)
        tokens[rows] = draw_by_operators(tail.select_rows(rows), scores[rows], uniforms[rows])
    return tokens


def draw_by_operators(tail: FusedTail, scores: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The same for any device: the reference of the kernels."""
    candidates = tail.find_candidates(scores)
    if candidates is None:
        return draw(tail.run_plainly(scores), uniforms)
    return draw(candidates[1], uniforms, candidates[0])


def draw_by_kernels(tail: FusedTail, scores: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The same in Triton's kernels, where twenty operators would each cost more than their work."""
    from unspool.kernels.gpu.sampling.tail import TailSettings, draw_tail  # Triton is imported where a GPU is used

    assert tail.top_k is not None
    settings = TailSettings(
        top_k=tail.top_k.column(scores),
        largest_k=tail.top_k.largest,
        temperature=tail.temperature.column(scores) if tail.temperature is not None else None,
        top_p=tail.top_p.column(scores) if tail.top_p is not None else None,
        fewest=tail.top_p.min_tokens_to_keep if tail.top_p is not None else 1,
        min_p=tail.min_p.column(scores) if tail.min_p is not None else None,
        top_a=tail.top_a.column(scores) if tail.top_a is not None else None,
        typical=tail.typical.column(scores) if tail.typical is not None else None,
        epsilon=tail.epsilon.column(scores) if tail.epsilon is not None else None,
        eta=tail.eta.column(scores) if tail.eta is not None else None,
    )
    return draw_tail(scores, uniforms, settings)
