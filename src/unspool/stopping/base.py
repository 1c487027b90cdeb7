"""What a stopping criterion is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch


class StoppingCriteria(ABC):
    """Says which rows stop; `scores` is what the caller keeps of them, which may be None."""

    @abstractmethod
    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
        """One bool for all rows, or one per row, from the tokens so far (rows, length)."""
