"""Log-probabilities in one call of the CPU library, whose threads have the cores: of all tokens, or the likeliest."""

from __future__ import annotations

import torch

from unspool.kernels.cpu.library import Library, find_library


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


def _find_library(scores: torch.Tensor) -> Library | None:
    is_fit = scores.device.type == "cpu" and scores.dtype == torch.float32 and scores.dim() == 2 and scores.numel() > 0
    return find_library() if is_fit else None
