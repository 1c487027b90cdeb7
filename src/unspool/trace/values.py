"""Numbers as events have them: finite, and no longer than they are exact."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

Show = Callable[[int], str]
"""From a token's id to the text that is shown for it."""


def shorten(value: float) -> float | None:
    """A number of at most six digits; None for what JSON has no number for."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def list_likeliest(logprobs: torch.Tensor, count: int, show: Show) -> list[dict[str, Any]]:
    """The likeliest tokens of log-probabilities (vocab,), each with its probability."""
    found = logprobs.topk(min(count, len(logprobs)))
    pairs = zip(found.indices.tolist(), found.values.exp().tolist(), strict=True)
    return [{"id": token, "text": show(token), "p": shorten(p)} for token, p in pairs]
