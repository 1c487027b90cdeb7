"""Processors that mend scores."""

from __future__ import annotations

import torch

from unspool.logits.base import LogitsProcessor


class InfNanRemoveLogitsProcessor(LogitsProcessor):
    """Replaces NaN by 0 and infinite scores by the largest finite ones."""

    counts_columns = False

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """The scores, all finite."""
        limits = torch.finfo(scores.dtype)
        return torch.nan_to_num(scores, nan=0.0, posinf=limits.max, neginf=limits.min)


class LogitNormalization(LogitsProcessor):
    """Turns scores into log-probabilities."""

    counts_columns = False

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """The logarithm of the scores' softmax; a row without tokens, which has none, stays as it is."""
        is_empty = scores.amax(dim=-1, keepdim=True).isneginf()
        return scores.log_softmax(dim=-1).masked_fill_(is_empty, float("-inf"))
