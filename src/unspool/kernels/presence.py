"""Whether this installation and a device can run the Triton kernels."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Final

import torch

from unspool.errors import UnsupportedError

SMALLEST_CAPABILITY: Final = (8, 0)  # Ampere: what our kernels are written for


@cache
def has_triton() -> bool:
    """Whether Triton is installed; it is imported only if a GPU is used."""
    return find_spec("triton") is not None


def refuse_forked(device: torch.device) -> None:
    """Raise if a device was its parent's, of which this process is a fork: CUDA can't be used in one."""
    is_lost = getattr(torch.cuda, "_is_in_bad_fork", None)
    if device.type == "cuda" and is_lost is not None and is_lost():
        raise UnsupportedError(
            "this process was forked from one that uses CUDA, which can't be used in both. Start it by `spawn` "
            "(multiprocessing.get_context('spawn')), which loads the model again, or fork before a GPU is used"
        )


@cache
def runs_kernels(device: torch.device) -> bool:
    """Whether our Triton kernels run on a device."""
    return device.type == "cuda" and has_triton() and torch.cuda.get_device_capability(device) >= SMALLEST_CAPABILITY


def takes_kernels(scores: torch.Tensor) -> bool:
    """Whether our kernels work on these scores (rows, vocab)."""
    is_fit = scores.dtype == torch.float32 and scores.dim() == 2 and scores.numel() > 0
    return is_fit and runs_kernels(scores.device)
