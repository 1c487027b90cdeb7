"""A model's norms as the kernels of captured passes take them."""

from __future__ import annotations

from typing import Any

import torch

from unspool.kernels.gpu.products.norms import normalise
from unspool.kernels.gpu.sampling.sketch import HeadInput
from unspool.models.weights import Norm


def norm_arguments(norm: Norm) -> dict[str, Any]:
    """What a product or a sum takes that normalises what it reads or writes."""
    return {"norm": norm.weight, "eps": norm.eps, "centres": norm.is_layer, "shift": norm.bias}


def describe_head_input(x: torch.Tensor, norm: Norm | None, scale: float = 1.0) -> HeadInput:
    """A state (rows, hidden) and the norm that the head reads it through, rounded as the head's own product rounds it:
    of one row, norms of squares are not."""
    if norm is None:
        return HeadInput(x, scale=scale)
    is_rounded = norm.is_layer or scale != 1.0 or x.shape[0] > 1
    return HeadInput(x, has_norm=True, scale=scale, is_rounded=is_rounded, **norm_arguments(norm))


def normalise_by(norm: Norm, x: torch.Tensor, out: torch.Tensor, **more: Any) -> None:
    """Write a norm of rows by a kernel of its own."""
    normalise(x, norm.weight, norm.eps, out, centres=norm.is_layer, shift=norm.bias, **more)
