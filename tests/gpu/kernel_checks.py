"""What tests of kernels share: where they run, on which numbers, and how exact a result must be."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # the interpreter counts with numpy
    pytest.mark.skipif(not HAS_GPU and not IS_INTERPRETED, reason="needs a CUDA device or Triton's interpreter"),
]
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")
# Triton's interpreter knows no bfloat16 in every operation; a GPU does.
DTYPES = [torch.float32, torch.bfloat16, torch.float16] if HAS_GPU else [torch.float32]
HALF_DTYPES = [torch.float16] + ([torch.bfloat16] if HAS_GPU else [])


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def check(
    found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, *, largest_score: float = 0.0, factors: int = 1
) -> None:
    """The error's size beside the result's, as float64 has it; a weight is as exact as its score in float32, and a
    product has the errors of all its factors."""
    expected = expected.double()
    error = (found.double() - expected).norm() / expected.norm()
    allowed = factors * (1e-5 if dtype == torch.float32 else 6e-3) + largest_score * torch.finfo(torch.float32).eps
    assert error < allowed, float(error)
