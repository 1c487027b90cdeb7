"""The floor of a beam search: only the forward passes of its steps."""

from __future__ import annotations

from typing import Any

import torch

from unspool.cache import BranchingCache


@torch.no_grad()
def run_forwards(model: Any, ids: torch.Tensor, num_beams: int, num_new: int) -> None:
    """Read the prompts once, then step all their beams: no scoring, no choosing, no reordering."""
    batch, width = ids.shape
    cache = model.new_cache("dynamic", batch, width)
    model.forward(ids, cache)
    cache = BranchingCache(cache, num_beams)
    tokens = ids[:, -1:].repeat_interleave(num_beams, dim=0)  # (batch * beams, 1)
    for _ in range(num_new - 1):  # the prompt's pass scores the first token
        model.forward(tokens, cache)
