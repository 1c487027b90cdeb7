"""torch's operations: what the rules are checked with where neither framework is installed."""

from __future__ import annotations

from typing import Any

import torch

from unspool.frameworks.arrays import Arrays


class _TorchArrays:
    def ids(self, values: Any, like: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(values, device=like.device).to(torch.int32)

    def places(self, like: torch.Tensor) -> torch.Tensor:
        return torch.arange(like.shape[-1], dtype=torch.int32, device=like.device)

    def full(self, scores: torch.Tensor, value: float) -> torch.Tensor:
        return torch.full_like(scores, value)

    def where(self, condition: torch.Tensor, yes: Any, no: torch.Tensor) -> torch.Tensor:
        return torch.where(condition, yes, no)

    def lowest(self, scores: torch.Tensor) -> float:
        return torch.finfo(scores.dtype).min

    def all(self, condition: torch.Tensor) -> torch.Tensor:
        return condition.all(-1)

    def sort_down(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, order = scores.sort(dim=-1, descending=True, stable=True)
        return values, order

    def unsort(self, values: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(values).scatter(-1, order, values)

    def sum_up(self, scores: torch.Tensor) -> torch.Tensor:
        return scores.softmax(-1).cumsum(-1)

    def logsumexp(self, scores: torch.Tensor) -> torch.Tensor:
        return scores.logsumexp(-1, keepdim=True)

    def max(self, scores: torch.Tensor) -> torch.Tensor:
        return scores.amax(-1, keepdim=True)

    def columns(self, ids: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        return ids.index_select(-1, at)

    def mark(self, ids: torch.Tensor, is_on: torch.Tensor, vocab: int) -> torch.Tensor:
        counted = torch.zeros(ids.shape[0], vocab, dtype=torch.int32, device=ids.device)
        return counted.scatter_reduce(-1, ids.long(), is_on.to(torch.int32), "amax") > 0


def open_torch() -> Arrays:
    """torch's operations."""
    return _TorchArrays()
