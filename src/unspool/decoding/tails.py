"""Drawing from a fused tail: on a GPU in two kernels, on a CPU in one call of its library, or operator by operator."""

from __future__ import annotations

import torch

from unspool.decoding.select import draw
from unspool.kernels.cpu.library import UNSURE
from unspool.kernels.draws import draw_rows
from unspool.kernels.presence import runs_kernels
from unspool.logits.fused import FusedTail

_prepared: set[tuple[torch.device, int, tuple[int, ...] | None]] = set()  # compiled in this process
MOST_RANKED = 256  # candidates that kernels rank by comparing each with each: 1,000 take three times what a sort takes


def draw_from_tail(tail: FusedTail, scores: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The tokens (rows,) drawn from what the tail leaves of scores (rows, vocab)."""
    if scores.device.type == "cpu":
        return draw_by_library(tail, scores, uniforms)
    if scores.dtype == torch.float32 and runs_kernels(scores.device):
        if _can_rank(tail):
            return draw_by_kernels(tail, scores, uniforms)
        if _can_search(tail):
            return draw_by_search(tail, scores, uniforms)
    return draw_by_operators(tail, scores, uniforms)


def _can_rank(tail: FusedTail) -> bool:
    return tail.can_be_ranked and tail.top_k is not None and tail.top_k.largest <= MOST_RANKED


def _can_search(tail: FusedTail) -> bool:
    """Whether kernels find where whole rows are cut, and something but the temperature cuts."""
    if tail.top_p is not None and tail.top_p.min_tokens_to_keep > 1:
        return False
    return any(part is not None for part in (tail.top_k, tail.top_p, tail.min_p, *tail.after))


def prepare_draws(tail: FusedTail | None, num_rows: int, vocab: int, device: torch.device) -> None:
    """Start compiling the kernels of a call's draws, so that they are there once its prompts have been read."""
    if not runs_kernels(device) or (tail is not None and not _can_rank(tail) and not _can_search(tail)):
        return
    key = (device, vocab, None if tail is None else _describe(tail))
    if key in _prepared:
        return
    _prepared.add(key)
    from unspool.kernels.gpu.launching import compile_beside  # Triton is imported where a GPU is used
    from unspool.kernels.gpu.sampling.row_draw import draw_row

    nowhere = torch.device("meta")  # kernels are compiled for dtypes and sizes
    scores = torch.empty(num_rows, vocab, dtype=torch.float32, device=nowhere)
    uniforms = torch.empty(num_rows, dtype=torch.float64, device=nowhere)
    if tail is None:
        compile_beside(lambda: draw_row(scores, uniforms))
    else:
        work = draw_by_kernels if _can_rank(tail) else draw_by_search
        compile_beside(lambda: work(tail, scores, uniforms))


def _describe(tail: FusedTail) -> tuple[int, ...]:
    """What the kernels of a tail are compiled for."""
    others = (tail.temperature, tail.top_p, tail.min_p, tail.top_a, tail.typical, tail.epsilon, tail.eta)
    return (tail.top_k.largest if tail.top_k is not None else 0, *(other is not None for other in others))


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


def draw_by_search(tail: FusedTail, scores: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The same without a top-k that leaves few candidates: kernels find where whole rows are cut."""
    from unspool.kernels.gpu.sampling.whole_tail import PARTS, draw_whole  # Triton is imported where a GPU is used

    parts = {name: getattr(tail, name) for name in ("temperature", *PARTS)}
    settings = {name: part.column(scores) for name, part in parts.items() if part is not None}
    return draw_whole(scores, uniforms, settings)
