"""Launching kernels: compiled in parallel the first time, started by the shortest way later, and overlapped with the
kernel before.

The overlap is programmatic dependent launch (PDL): a kernel may start before the one it reads from has ended. Triton's
own way to start a kernel that it has compiled takes the host some 30 µs, mostly to find out which one that is.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
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
KNOWS_START: Final = triton.__version__.startswith("3.6.")  # of the versions that our way was tried with
_state = threading.local()
_started: dict[Any, tuple[Any, list[Any]]] = {}  # compiled kernels and their constants


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
        return
    if not KNOWS_START or type(kernel) is not triton.JITFunction:
        kernel[grid](*args, **options)
        return
    device = torch._C._cuda_getDevice()
    described = describe_arguments(args)
    key = None if described is None else (id(kernel), device, tuple(options.items()), tuple(described[0]))
    known = None if key is None else _started.get(key)
    if known is None:
        compiled = kernel[grid](*args, **options)
        constants = _list_constants(kernel, len(args), options)
        if key is not None and constants is not None:
            _started[key] = (compiled, constants)
        return
    compiled, constants = known
    assert described is not None
    x, y, z = (*grid, 1, 1)[:3]
    stream = torch._C._cuda_getCurrentRawStream(device)
    function, metadata = compiled.function, compiled.packed_metadata
    compiled.run(x, y, z, stream, function, metadata, None, None, None, *described[1], *constants)


def describe_arguments(args: Sequence[Any]) -> tuple[list[Any], list[Any]] | None:
    """What Triton compiles kernels for: each argument's type, whether an address or a number is a multiple of 16, and
    whether a number is 1. And the arguments as a compiled kernel takes them. None if there are others."""
    kinds: list[Any] = []
    values: list[Any] = []
    for arg in args:
        if isinstance(arg, torch.Tensor) and arg.is_cuda:
            address = arg.data_ptr()
            kinds.append((arg.dtype,) if address & 15 else arg.dtype)
            values.append(address)
        elif type(arg) is int and -(1 << 63) <= arg < 1 << 63:
            is_wide = not -(1 << 31) <= arg < 1 << 31
            kinds.append((is_wide, arg == 1, arg & 15 == 0))
            values.append(arg)
        elif type(arg) is float:
            kinds.append(float)
            values.append(arg)
        else:
            return None
    return kinds, values


def _list_constants(kernel: Any, num_args: int, options: dict[str, Any]) -> list[Any] | None:
    """The values of the parameters after the first `num_args`, if all are constants that `options` names."""
    given, constants = kernel.params[:num_args], kernel.params[num_args:]
    if any(one.is_constexpr for one in given) or not all(one.is_constexpr and one.name in options for one in constants):
        return None
    return [options[one.name] for one in constants]


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
