"""Root-mean-square and layer normalisation, in float32 where the input is narrower than its weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x over its root mean square, times weight (Zhang and Sennrich, 2019)."""
    if x.dtype == weight.dtype:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x.to(weight.dtype), weight.shape, weight, eps).to(x.dtype)


def layer_norm(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """x with mean 0 and variance 1 over its last axis, then scaled and shifted (Ba et al., 2016)."""
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
