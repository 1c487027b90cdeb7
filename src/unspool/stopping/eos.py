"""Stopping at an end token."""

from __future__ import annotations

from typing import Any

import torch

from unspool.errors import SettingError
from unspool.stopping.base import StoppingCriteria

MOST_IDS = 65_536


class EosTokenCriteria(StoppingCriteria):
    """Stops the rows whose last token is an end token."""

    def __init__(self, eos_token_id: int | list[int] | torch.Tensor) -> None:
        try:
            ids = torch.as_tensor(eos_token_id).reshape(-1)
        except (TypeError, ValueError, RuntimeError) as error:
            raise SettingError(f"`eos_token_id` must be a token id or several, but is {eos_token_id!r}.") from error
        if not 0 < ids.numel() <= MOST_IDS or ids.dtype == torch.bool or ids.is_floating_point():
            raise SettingError(f"`eos_token_id` must be a token id or several, but is {eos_token_id!r}.")
        self.eos_token_id = ids.to(torch.int64)  # (ends,)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """The rows that end in an end token."""
        if self.eos_token_id.device != input_ids.device:
            self.eos_token_id = self.eos_token_id.to(input_ids.device)
        return (input_ids[:, -1:] == self.eos_token_id).any(dim=-1)  # (rows,)
