"""Log-probabilities in one call of the CPU library, whose threads have the cores: of all tokens, or the likeliest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from unspool.kernels.cpu.library import Library, find_library

_MOST_FORBIDDEN: Final = 64  # tokens that are ranked beside those that are wanted


def log_probabilities(scores: torch.Tensor) -> torch.Tensor:
    """`torch.log_softmax` of scores (rows, vocab) float32."""
    library = _find_library(scores)
    found = None if library is None else library.normalise_rows(scores)
    return torch.log_softmax(scores, dim=-1) if found is None else found


def rank_rows(scores: torch.Tensor, count: int, *, normalises: bool) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The `count` highest of scores (rows, vocab), falling, or their log-probabilities; and their tokens.

    None if there is no library for these scores, or a row has fewer that are finite.
    """
    library = _find_library(scores)
    if library is None:
        return None
    values, tokens = library.rank_rows(scores, count, normalises=normalises)
    return None if bool((tokens[:, 0] < 0).any()) else (values, tokens)


def rank_allowed(
    scores: torch.Tensor, count: int, forbidden: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The log-probabilities of the `count` likeliest tokens of scores (rows, vocab) that are not forbidden, falling;
    and the tokens. Forbidden ones have their part in the probabilities.

    None where `rank_rows` is, or if very many are forbidden.
    """
    known = sorted({token for token in forbidden if 0 <= token < scores.shape[-1]})
    if len(known) > _MOST_FORBIDDEN or count + len(known) > scores.shape[-1]:
        return None
    ranked = rank_rows(scores, count + len(known), normalises=True)
    if ranked is None or not known:
        return ranked
    values, tokens = ranked
    is_forbidden = torch.isin(tokens, torch.tensor(known))
    kept = is_forbidden.int().argsort(dim=1, stable=True)[:, :count]
    return values.gather(1, kept), tokens.gather(1, kept)


def _find_library(scores: torch.Tensor) -> Library | None:
    is_fit = scores.device.type == "cpu" and scores.dtype == torch.float32 and scores.dim() == 2 and scores.numel() > 0
    return find_library() if is_fit else None
