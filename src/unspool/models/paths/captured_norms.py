"""A model's norms as the kernels of captured passes take them."""

from __future__ import annotations

from typing import Any

import torch

from unspool.kernels.gpu.products.norms import normalise
from unspool.models.weights import Norm


def norm_arguments(norm: Norm) -> dict[str, Any]:
    """What a product or a sum takes that normalises what it reads or writes."""
    return {"norm": norm.weight, "eps": norm.eps, "centres": norm.is_layer, "shift": norm.bias}


def normalise_by(norm: Norm, x: torch.Tensor, out: torch.Tensor, **more: Any) -> None:
    """Write a norm of rows by a kernel of its own."""
    normalise(x, norm.weight, norm.eps, out, centres=norm.is_layer, shift=norm.bias, **more)
