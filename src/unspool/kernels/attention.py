"""Attention of new queries over the keys in view: one function for every shape the models need."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F


def attend(
    queries: torch.Tensor,  # (rows, heads, new, width)
    keys: torch.Tensor,  # (rows, kv_heads, keys, width)
    values: torch.Tensor,  # (rows, kv_heads, keys, width)
    *,
    scale: float,
    mask: torch.Tensor | None = None,  # boolean (what may be seen) or additive, broadcast to (rows, heads, new, keys)
    is_causal: bool = False,  # queries and keys are the same positions
    softcap: float | None = None,
    want_weights: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The attention output (rows, heads, new, width), and the attention weights if they are wanted."""
    if want_weights or softcap is not None:
        read, weights = _attend_explicitly(queries, keys, values, scale, mask, is_causal, softcap)
        return read, weights if want_weights else None
    rows, heads, num_new, width = queries.shape
    kv_heads = keys.shape[1]
    if heads == kv_heads:
        return _attend_fused(queries, keys, values, mask, scale=scale, is_causal=is_causal), None
    if num_new == 1:  # the heads that share a key become its queries: keys are read once, not once per head
        if mask is not None and mask.shape[1] > 1:
            mask = mask.reshape(mask.shape[0], kv_heads, heads // kv_heads, mask.shape[-1])
        grouped = queries.reshape(rows, kv_heads, heads // kv_heads, width)
        read = _attend_fused(grouped, keys, values, mask, scale=scale)
        return read.reshape(rows, heads, 1, width), None
    return _attend_fused(queries, keys, values, mask, scale=scale, is_causal=is_causal, enable_gqa=True), None


def _attend_fused(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, **settings: Any
) -> torch.Tensor:
    """torch's own attention, on a GPU without cuDNN's, which spends 60 ms on a new plan for every new length."""
    if not queries.is_cuda or torch.compiler.is_compiling() or not _has_cudnn():
        return F.scaled_dot_product_attention(queries, keys, values, mask, **settings)
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        return F.scaled_dot_product_attention(queries, keys, values, mask, **settings)
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)


def _has_cudnn() -> bool:
    return bool(torch.backends.cuda.cudnn_sdp_enabled())  # type: ignore[no-untyped-call]  # torch's own


def _attend_explicitly(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    mask: torch.Tensor | None,
    is_causal: bool,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, heads, num_new, width = queries.shape
    kv_heads, num_keys = keys.shape[1], keys.shape[2]
    grouped = queries.reshape(rows, kv_heads, -1, width)  # the heads that share a key, one after the other
    scores = torch.matmul(grouped, keys.transpose(-1, -2)).view(rows, heads, num_new, num_keys).float() * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if is_causal:
        mask = torch.ones(num_new, num_keys, dtype=torch.bool, device=queries.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    weights = scores.softmax(-1).to(values.dtype)  # (rows, heads, new, keys)
    read = torch.matmul(weights.view(rows, kv_heads, -1, num_keys), values)
    return read.view(rows, heads, num_new, width), weights
