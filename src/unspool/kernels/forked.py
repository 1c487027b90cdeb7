"""Attention of several queries at the same position of one row: its keys are read once and in place."""

from __future__ import annotations

import torch

from unspool.kernels.attention import attend


def attend_forked(
    queries: torch.Tensor,  # (rows * forks, heads, 1, width)
    keys: torch.Tensor,  # (rows, kv_heads, keys, width)
    values: torch.Tensor,
    *,
    num_forks: int,
    scale: float,
    mask: torch.Tensor | None,  # additive, from `fold_mask`; or boolean (rows, 1, 1, keys), the same for all forks
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,  # (1, heads, 1)
    want_weights: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The attention output (rows * forks, heads, 1, width), and the weights over all keys if they are wanted."""
    kv_heads = keys.shape[1]
    folded = queries.reshape(keys.shape[0], num_forks, kv_heads, -1, queries.shape[-1]).transpose(1, 2).flatten(2, 3)
    if sinks is not None:
        sinks = sinks.view(1, kv_heads, 1, -1).expand(-1, -1, num_forks, -1).flatten(2)
    read, weights = attend(
        folded, keys, values, scale=scale, mask=mask, softcap=softcap, sinks=sinks, want_weights=want_weights
    )  # (rows, kv_heads, forks * heads that share a key, width)
    unfolded = _unfold(read, num_forks)
    return unfolded, None if weights is None else _unfold(weights, num_forks)


def fold_mask(mask: torch.Tensor, num_forks: int, heads: int, kv_heads: int) -> torch.Tensor:
    """A mask over forks (rows * forks, heads or 1, 1, keys) as `attend_forked` takes it; one row may serve all."""
    num_keys, group = mask.shape[-1], heads // kv_heads
    if mask.shape[1] == 1:
        folded = mask.reshape(-1, 1, num_forks, 1, num_keys).expand(-1, -1, -1, group, -1)
    else:
        folded = mask.reshape(-1, num_forks, kv_heads, group, num_keys).transpose(1, 2)
    return folded.flatten(2, 3)


def _unfold(values: torch.Tensor, num_forks: int) -> torch.Tensor:
    """(rows, kv_heads, forks * group, any) → (rows * forks, heads, 1, any)."""
    rows, kv_heads = values.shape[:2]
    by_fork = values.reshape(rows, kv_heads, num_forks, -1, values.shape[-1]).transpose(1, 2)
    return by_fork.reshape(rows * num_forks, -1, 1, values.shape[-1])
