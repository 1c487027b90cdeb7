"""Launching kernels: compiled in parallel the first time, and overlapped with the kernel before.

The overlap is programmatic dependent launch (PDL): a kernel may start before the one it reads from has ended.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import Any, Final

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tlx

HOPPER: Final = (9, 0)
LINE_BYTES: Final = 128  # of a cache
_MOST_COMPILERS: Final = 12  # threads
_state = threading.local()


@cache
def can_overlap() -> bool:
    """Whether kernels may be started before the one they read from has ended: on Hopper and later."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= HOPPER


def launch_options() -> dict[str, Any]:
    """The options for every launch of a kernel that calls `wait_for_input`."""
    return {"PDL": True, "launch_pdl": True} if can_overlap() else {"PDL": False}


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Launch a kernel; inside `compile_ahead`, only compile it."""
    if getattr(_state, "only_compiles", False):
        kernel.warmup(*args, grid=grid, **options)
    else:
        kernel[grid](*args, **options)


@contextmanager
def compile_ahead() -> Iterator[None]:
    """Compile the kernels that are launched inside, all in parallel, and start none of them.

    The first step on a machine would otherwise compile some ten kernels one after the other.
    """
    if not hasattr(triton, "AsyncCompileMode") or not torch.cuda.is_available():
        yield
        return
    _state.only_compiles = True
    try:
        with ThreadPoolExecutor(_MOST_COMPILERS) as threads, triton.AsyncCompileMode(threads):
            yield
    finally:
        _state.only_compiles = False


@triton.jit
def wait_for_input(PDL: tl.constexpr):
    """Wait until the kernel before has finished writing. What it does not write may be loaded earlier."""
    if PDL:
        tlx.gdc_wait()


@triton.jit
def let_next_start(PDL: tl.constexpr):
    """Let the kernel after this one start, up to where it waits."""
    if PDL:
        tlx.gdc_launch_dependents()


@triton.jit
def ask_for(at, is_asked, PDL: tl.constexpr):
    """Prefetch the cache lines at some addresses into the L2 cache, without waiting.

    Inputs that the kernel before does not write can be prefetched while it still runs.
    """
    if PDL:
        tl.inline_asm_elementwise(
            """{
            .reg .pred asked;
            setp.ne.s32 asked, $2, 0;
            @asked prefetch.global.L2 [$1];
            mov.b32 $0, 0;
            }""",
            "=r,l,r", [at.to(tl.int64), is_asked.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
