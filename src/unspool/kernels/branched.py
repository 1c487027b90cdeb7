"""Attention of branches that share a prompt: its keys are read once per prompt, not once per branch."""

from __future__ import annotations

import torch

from unspool.kernels.attention import attend, soften
from unspool.kernels.halves import is_slow, widen


def attend_branches(
    queries: torch.Tensor,  # (prompts * branches, heads, new, width)
    shared_keys: torch.Tensor,  # (prompts, kv_heads, shared, width)
    shared_values: torch.Tensor,
    own_keys: torch.Tensor,  # (prompts * branches, kv_heads, own, width)
    own_values: torch.Tensor,
    *,
    scale: float,
    mask: torch.Tensor | None = None,  # over shared and own keys: (rows, heads or 1, new, shared + own)
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,  # (1, heads, 1)
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The attention output (rows, heads, new, width), and the weights over shared and own keys if they are computed."""
    if is_slow(queries):
        parts = map(widen, (queries, shared_keys, shared_values, own_keys, own_values))
        wide, seen = attend_branches(*parts, scale=scale, mask=mask, softcap=softcap, sinks=sinks)
        return wide.to(queries.dtype), None if seen is None else seen.to(queries.dtype)
    if mask is None and softcap is None and sinks is None and _can_merge(queries):
        return _merge_parts(queries, shared_keys, shared_values, own_keys, own_values, scale), None
    rows, heads, num_new, width = queries.shape
    prompts, kv_heads, num_shared = shared_keys.shape[:3]
    branches = rows // prompts
    by_prompt = (prompts, branches, kv_heads, (heads // kv_heads) * num_new)  # queries that meet the same keys
    grouped = queries.reshape(*by_prompt, width).transpose(1, 2).reshape(prompts, kv_heads, -1, width)
    to_shared = torch.matmul(grouped, shared_keys.transpose(-1, -2))  # (prompts, kv_heads, branches * group, shared)
    to_shared = to_shared.reshape(prompts, kv_heads, branches, -1, num_shared).transpose(1, 2)
    to_own = torch.matmul(queries.reshape(rows, kv_heads, -1, width), own_keys.transpose(-1, -2))
    scores = torch.cat((to_shared.reshape(rows, heads, num_new, -1), to_own.reshape(rows, heads, num_new, -1)), -1)
    scores = scores.float() * scale  # (rows, heads, new, shared + own)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    weights = soften(scores, sinks).to(own_values.dtype)
    from_shared, from_own = weights[..., :num_shared], weights[..., num_shared:]
    folded = from_shared.reshape(*by_prompt, num_shared).transpose(1, 2).reshape(prompts, kv_heads, -1, num_shared)
    read = torch.matmul(folded, shared_values).reshape(prompts, kv_heads, branches, -1, width).transpose(1, 2)
    read = read.reshape(rows, kv_heads, -1, width) + torch.matmul(
        from_own.reshape(rows, kv_heads, -1, from_own.shape[-1]), own_values
    )
    return read.reshape(rows, heads, num_new, width), weights


def attend_shared(
    queries: torch.Tensor,  # (prompts * branches, heads, new, width)
    keys: torch.Tensor,  # (prompts, kv_heads, keys, width)
    values: torch.Tensor,
    *,
    scale: float,
    mask: torch.Tensor | None = None,  # the same for all branches and queries: (prompts, 1, 1, keys)
    want_weights: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of branches that have no keys of their own: they become further queries over their prompt's keys."""
    (rows, heads, num_new, _), prompts = queries.shape, keys.shape[0]
    branches = rows // prompts
    if branches == 1:
        return attend(queries, keys, values, scale=scale, mask=mask, want_weights=want_weights)
    folded = queries.view(prompts, branches, heads, num_new, -1).transpose(1, 2).flatten(2, 3)
    read, weights = attend(folded, keys, values, scale=scale, mask=mask, want_weights=want_weights)
    apart = (prompts, heads, branches, num_new, -1)
    unfolded = [
        None if part is None else part.reshape(apart).transpose(1, 2).flatten(0, 1)  # (rows, heads, new, …)
        for part in (read, weights)
    ]
    assert unfolded[0] is not None
    return unfolded[0], unfolded[1]


def _can_merge(queries: torch.Tensor) -> bool:
    return queries.device.type == "cpu" and queries.dtype == torch.float32


def _merge_parts(
    queries: torch.Tensor,
    shared_keys: torch.Tensor,
    shared_values: torch.Tensor,
    own_keys: torch.Tensor,
    own_values: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Attend to both parts separately, and combine the outputs by each part's share of the attention weights.

    torch's flash attention for the CPU returns the log-sum-exp of the scores; it also reads keys in place, where plain
    products would copy them first.
    """
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    rows, heads, num_new, width = queries.shape
    prompts, kv_heads = shared_keys.shape[:2]
    branches, group = rows // prompts, heads // kv_heads * num_new
    own_queries = queries.reshape(rows, kv_heads, group, width)
    folded = own_queries.reshape(prompts, branches, kv_heads, group, width).transpose(1, 2)
    from_shared, shared_log = flash(
        folded.reshape(prompts, kv_heads, branches * group, width), shared_keys, shared_values, scale=scale
    )
    from_own, own_log = flash(own_queries, own_keys, own_values, scale=scale)
    by_branch = (prompts, kv_heads, branches, group)
    from_shared = from_shared.reshape(*by_branch, width).transpose(1, 2).reshape(rows, kv_heads, group, width)
    shared_log = shared_log.reshape(by_branch).transpose(1, 2).reshape(rows, kv_heads, group)
    part = torch.sigmoid(shared_log - own_log.reshape(rows, kv_heads, group)).unsqueeze(-1)
    return torch.lerp(from_own, from_shared, part).reshape(rows, heads, num_new, width)
