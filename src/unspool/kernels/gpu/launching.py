"""How kernels follow each other: the next one starts while the last one ends (programmatic dependent launch)."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tlx

HOPPER = (9, 0)


@cache
def can_overlap() -> bool:
    """Whether kernels may be started before the one they read from has ended: on Hopper and later."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= HOPPER


def launch_options() -> dict[str, Any]:
    """What every launch of a kernel that calls `wait_for_input` passes."""
    return {"PDL": True, "launch_pdl": True} if can_overlap() else {"PDL": False}


@triton.jit
def wait_for_input(PDL: tl.constexpr):
    """Wait until the kernel before has written all it writes. What does not come from it may be loaded earlier."""
    if PDL:
        tlx.gdc_wait()


@triton.jit
def let_next_start(PDL: tl.constexpr):
    """Let the kernel after this one start, up to where it waits."""
    if PDL:
        tlx.gdc_launch_dependents()
