"""Activation functions by the names that configs use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
import torch.nn.functional as F

from unspool.errors import UnsupportedError

Activation = Callable[[torch.Tensor], torch.Tensor]


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


def _quick_gelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


def _relu2(x: torch.Tensor) -> torch.Tensor:
    return F.relu(x).square()


# gelu_new, gelu_fast and gelu_pytorch_tanh are three spellings of one formula.
ACTIVATIONS: Final[dict[str, Activation]] = {
    "silu": F.silu,
    "swish": F.silu,
    "relu": F.relu,
    "relu2": _relu2,
    "gelu": F.gelu,
    "gelu_new": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "quick_gelu": _quick_gelu,
}


def find_activation(name: str) -> Activation:
    """The activation function of that name."""
    if name not in ACTIVATIONS:
        raise UnsupportedError(f"the activation {name!r} is not built; these are: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]
