"""Stopping after a time."""

from __future__ import annotations

import time
from typing import Any

import torch

from unspool.errors import SettingError
from unspool.numeric import is_number
from unspool.stopping.base import StoppingCriteria


class MaxTimeCriteria(StoppingCriteria):
    """Stops once `max_time` seconds have passed since `initial_timestamp` (by `time.time()`; now by default)."""

    def __init__(self, max_time: float, initial_timestamp: float | None = None) -> None:
        if not is_number(max_time, allows_infinity=True):
            raise SettingError(f"`max_time` must be a number of seconds, but is {max_time!r}.")
        self.max_time = max_time
        self.initial_timestamp = time.time() if initial_timestamp is None else initial_timestamp

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Every row, once the time is up."""
        return torch.full((input_ids.shape[0],), self.is_over(), dtype=torch.bool, device=input_ids.device)

    def is_over(self) -> bool:
        """Whether the time is up."""
        return time.time() - self.initial_timestamp > self.max_time
