"""Attention of new queries over the keys in view: one function for every shape the models need."""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.nn.functional as F

from unspool.kernels.halves import attend_halves, is_slow, widen
from unspool.kernels.presence import runs_kernels

_FEWEST_TOKENS: Final = 1024  # of a prompt, for a kernel of ours


def attend(
    queries: torch.Tensor,  # (rows, heads, new, width)
    keys: torch.Tensor,  # (rows, kv_heads, keys, width)
    values: torch.Tensor,  # (rows, kv_heads, keys, width)
    *,
    scale: float,
    mask: torch.Tensor | None = None,  # boolean (what may be seen) or additive, broadcast to (rows, heads, new, keys)
    is_causal: bool = False,  # queries and keys are the same positions
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,  # scores of a key without a value: broadcast to (rows, heads, new)
    want_weights: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The attention output (rows, heads, new, width), and the attention weights if they are wanted."""
    if is_slow(queries):
        given: dict[str, Any] = {"is_causal": is_causal, "softcap": softcap, "sinks": sinks}
        return _attend_widely(queries, keys, values, mask, scale=scale, want_weights=want_weights, **given)
    if want_weights or softcap is not None:
        read, weights = _attend_explicitly(queries, keys, values, scale, mask, is_causal, softcap, sinks)
        return read, weights if want_weights else None
    if sinks is not None:
        return _attend_beside_sinks(queries, keys, values, sinks, scale=scale, mask=mask, is_causal=is_causal), None
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


def _attend_widely(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, **settings: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention in float32 whose results are rounded, on a CPU where torch's own of such numbers is slow."""
    if not any(settings[name] for name in ("is_causal", "want_weights", "softcap")) and settings["sinks"] is None:
        read = attend_halves(queries, keys, values, mask, settings["scale"])
        if read is not None:
            return read, None
    wide_mask = mask if mask is None or mask.dtype == torch.bool else mask.float()
    wide, weights = attend(widen(queries), widen(keys), widen(values), mask=wide_mask, **settings)
    return wide.to(queries.dtype), None if weights is None else weights.to(queries.dtype)


def _attend_beside_sinks(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    sinks: torch.Tensor,
    *,
    scale: float,
    mask: torch.Tensor | None,
    is_causal: bool,
) -> torch.Tensor:
    """torch's own attention with a first key that has no value, and whose score is a query's sink.

    Queries get one more number, the sink, and keys one that only the first key has; numbers are added by the eight.
    """
    (rows, heads, num_new, width), num_keys = queries.shape, keys.shape[2]
    if is_causal:
        mask = torch.ones(num_new, num_keys, dtype=torch.bool, device=queries.device).tril()[None, None]
    if mask is None:
        mask = torch.zeros(1, 1, 1, num_keys, dtype=queries.dtype, device=queries.device)
    elif mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=queries.dtype).masked_fill_(~mask, -torch.inf)
    mask = F.pad(mask, (1, 0)).expand(-1, -1, num_new, -1)
    score = (sinks.to(queries.dtype) / scale).expand(rows, heads, num_new)[..., None]
    wide = torch.cat((queries, F.pad(score, (0, 7))), dim=-1)
    longer = F.pad(keys, (0, 8, 1, 0))
    longer[:, :, 0, width] = 1.0
    read, _ = attend(wide, longer, F.pad(values, (0, 8, 1, 0)), scale=scale, mask=mask)
    return read[..., :width]


def _attend_fused(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, **settings: Any
) -> torch.Tensor:
    """torch's own attention, on a GPU without cuDNN's, which spends 60 ms on a new plan for every new length.

    Long prompts have a kernel of ours on Hopper GPUs.
    """
    if mask is None and settings.get("is_causal") and _is_long(queries):
        from unspool.kernels.gpu.attention.prompt_attention import attend_prompt, can_attend_prompt

        if can_attend_prompt(queries, keys, values):
            return attend_prompt(queries, keys, values, settings["scale"])
    if not queries.is_cuda or torch.compiler.is_compiling() or not _has_cudnn():
        return F.scaled_dot_product_attention(queries, keys, values, mask, **settings)
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        return F.scaled_dot_product_attention(queries, keys, values, mask, **settings)
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)


def _is_long(queries: torch.Tensor) -> bool:
    """Whether queries are so many that a kernel of ours is worth its compilation."""
    if queries.shape[2] < _FEWEST_TOKENS or not runs_kernels(queries.device) or torch.compiler.is_compiling():
        return False
    return not (torch.is_grad_enabled() and queries.requires_grad)


def _has_cudnn() -> bool:
    return bool(torch.backends.cuda.cudnn_sdp_enabled())


def _attend_explicitly(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    mask: torch.Tensor | None,
    is_causal: bool,
    softcap: float | None,
    sinks: torch.Tensor | None,
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
    weights = soften(scores, sinks).to(values.dtype)  # (rows, heads, new, keys)
    read = torch.matmul(weights.view(rows, kv_heads, -1, num_keys), values)
    return read.view(rows, heads, num_new, width), weights


def soften(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """The softmax of scores (rows, heads, new, keys), of which sinks take a share."""
    if sinks is None:
        return scores.softmax(-1)
    beside = sinks.to(scores.dtype).expand(scores.shape[:-1])[..., None]
    return torch.cat((scores, beside), dim=-1).softmax(-1)[..., :-1]
