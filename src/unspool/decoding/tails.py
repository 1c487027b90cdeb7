"""Drawing from a fused tail: on a GPU in two kernels, on a CPU in one call of its library, or operator by operator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from unspool.decoding.select import draw, take_likeliest
from unspool.kernels.cpu.library import UNSURE
from unspool.kernels.draws import draw_rows
from unspool.kernels.presence import runs_kernels
from unspool.kernels.token_choice import ChoiceSizes
from unspool.logits.fused import FusedTail

if TYPE_CHECKING:
    from unspool.kernels.gpu.sampling.tail import TailSettings

DescribedDraw = tuple[ChoiceSizes, dict[str, torch.Tensor]]  # how, and the settings of its parts (rows or 1, 1)
_prepared: set[tuple[torch.device, int, tuple[int, ...] | None]] = set()  # compiled in this process
MOST_RANKED = 256  # candidates that kernels rank by comparing each with each: 1,000 take three times what a sort takes


def choose_token(scores: torch.Tensor, uniforms: torch.Tensor | None, tail: FusedTail | None = None) -> torch.Tensor:
    """The tokens (rows,) that are taken from scores (rows, vocab): the likeliest without numbers, or else those drawn
    from what the tail leaves of them."""
    if uniforms is None:
        return take_likeliest(scores)
    return draw(scores, uniforms) if tail is None else draw_from_tail(tail, scores, uniforms)


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
    from unspool.kernels.gpu.sampling.tail import draw_tail  # Triton is imported where a GPU is used

    return draw_tail(scores, uniforms, _read_settings(tail, scores))


def describe_draw(tail: FusedTail | None, num_rows: int, device: torch.device) -> DescribedDraw | None:
    """What a captured pass needs to know to draw by a tail as `draw_from_tail` does; None if it can't."""
    if tail is None:
        return ChoiceSizes(()), {}
    is_ranked = _can_rank(tail)
    if not is_ranked and tail.top_p is not None and tail.top_p.min_tokens_to_keep > 1:
        return None
    scores = torch.empty(num_rows, 1, device=device)
    settings = _list_columns(tail, scores)
    fewest = tail.top_p.min_tokens_to_keep if tail.top_p is not None else 1
    most_ranked = tail.top_k.largest if is_ranked and tail.top_k is not None else 0
    return ChoiceSizes(tuple(settings), most_ranked, fewest), settings


class JoinedTails:
    """Tails of rows that stand one after the other, drawn in one call of the kernels: what only some of them do has a
    value for the others that changes nothing."""

    def __init__(self, tails: Sequence[tuple[FusedTail, int]]) -> None:
        """The tails, each with its number of rows; they fit each other (`fits`)."""
        self._tails = list(tails)
        self._settings: TailSettings | None = None

    @staticmethod
    def fits(tail: FusedTail | None, device: torch.device) -> bool:
        """Whether rows can be drawn by this tail beside others."""
        if tail is None or not _can_rank(tail) or tail.after or not runs_kernels(device):
            return False
        return tail.top_p is None or tail.top_p.min_tokens_to_keep == 1

    def draw(self, scores: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
        """The tokens (rows,) drawn from scores (rows, vocab) float32."""
        from unspool.kernels.gpu.sampling.tail import draw_tail  # Triton is imported where a GPU is used

        if self._settings is None:
            self._settings = self._join(scores)
        return draw_tail(scores, uniforms, self._settings)

    def _join(self, scores: torch.Tensor) -> TailSettings:
        first, parts = 0, []
        for tail, count in self._tails:
            parts.append((_read_settings(tail, scores[first : first + count]), count))
            first += count

        def lay(name: str, neutral: float, dtype: torch.dtype) -> torch.Tensor | None:
            if all(getattr(one, name) is None for one, _ in parts):
                return None
            nothing = torch.full((1, 1), neutral, dtype=dtype, device=scores.device)
            found = [(getattr(one, name), count) for one, count in parts]
            return torch.cat([(nothing if one is None else one).expand(count, 1) for one, count in found])

        top_k = lay("top_k", 0, torch.int64)
        assert top_k is not None
        return replace(
            parts[0][0],
            top_k=top_k,
            largest_k=max(one.largest_k for one, _ in parts),
            temperature=lay("temperature", 1.0, torch.float32),
            top_p=lay("top_p", 2.0, torch.float64),  # more than all tokens sum to
            min_p=lay("min_p", -torch.inf, torch.float32),
        )


def _read_settings(tail: FusedTail, scores: torch.Tensor) -> TailSettings:
    """What the kernels need to know of a tail over scores (rows, vocab)."""
    from unspool.kernels.gpu.sampling.tail import TailSettings  # Triton is imported where a GPU is used

    assert tail.top_k is not None
    fewest = tail.top_p.min_tokens_to_keep if tail.top_p is not None else 1
    return TailSettings(largest_k=tail.top_k.largest, fewest=fewest, **_list_columns(tail, scores))


def draw_by_search(tail: FusedTail, scores: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The same without a top-k that leaves few candidates: kernels find where whole rows are cut."""
    from unspool.kernels.gpu.sampling.whole_tail import draw_whole  # Triton is imported where a GPU is used

    return draw_whole(scores, uniforms, _list_columns(tail, scores))


def _list_columns(tail: FusedTail, scores: torch.Tensor) -> dict[str, torch.Tensor]:
    """The settings of a tail's parts for scores (rows, vocab): (rows or 1, 1) each."""
    return {name: part.column(scores) for name, part in tail.list_parts().items()}
