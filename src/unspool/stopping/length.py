"""Stopping at a length."""

from __future__ import annotations

import logging
from typing import Any

import torch

from unspool.errors import SettingError
from unspool.stopping.base import StoppingCriteria

logger = logging.getLogger("unspool.stopping")


class MaxLengthCriteria(StoppingCriteria):
    """Stops at `max_length` tokens, the prompt included; past `max_position_embeddings` it logs a warning, once."""

    def __init__(self, max_length: int, max_position_embeddings: int | None = None) -> None:
        if isinstance(max_length, bool) or not isinstance(max_length, int) or max_length < 0:
            raise SettingError(f"`max_length` must be a whole number of tokens, but is {max_length!r}.")
        self.max_length = max_length
        self.max_position_embeddings = max_position_embeddings
        self._has_warned = False

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Every row, once the history is long enough."""
        rows, length = input_ids.shape[:2]
        is_done = length >= self.max_length
        longest = self.max_position_embeddings
        if longest is not None and not is_done and length > longest and not self._has_warned:
            self._has_warned = True
            logger.warning("%d tokens are more than the %d positions the model was made for.", length, longest)
        return torch.full((rows,), is_done, dtype=torch.bool, device=input_ids.device)
