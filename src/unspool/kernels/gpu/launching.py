"""Launching kernels: compiled in parallel the first time, and overlapped with the kernel before.

The overlap is programmatic dependent launch (PDL): a kernel may start before the one it reads from has ended.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from types import SimpleNamespace
from typing import Any, Final

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda as tlx
from triton.runtime import build as launchers

from unspool.forks import after_fork
from unspool.kernels.gpu.compiling import compile_elsewhere
from unspool.kernels.gpu.direct_driver import use_direct_driver
from unspool.kernels.gpu.relaunching import OverlapError, relaunch, remember
from unspool.kernels.preparations import begin_short_turns, end_short_turns, wait_for_preparations

HOPPER: Final = (9, 0)
LINE_BYTES: Final = 128  # of a cache
_MOST_COMPILERS: Final = 8  # kernels at once, in processes of their own: with more, the longest takes longer
_MOST_HERE: Final = 6  # in threads: half of a kernel's compilation holds Python's lock
Launched = tuple[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]]  # a kernel, its grid, arguments and options


class _State(threading.local):
    """Who takes this thread's launches instead of the device."""

    take: Callable[[Launched], None] | None = None
    overlaps: bool = True  # the next launch with the kernel before it


_state = _State()
_under_way: list[tuple[Any, Any]] = []  # kernels that are being compiled, and what their variants will be
_compilers: set[threading.Thread] = set()


def load_launchers_one_by_one() -> None:
    """Let threads load the functions that launch kernels in turn, and keep what each has loaded.

    Triton's modules of these functions have one name. Python makes one of them for all, and puts another function into
    it whenever a launcher is loaded again: a thread would take the one of another thread's kernel.
    """
    load = getattr(launchers, "_load_module_from_path", None)
    if load is None or hasattr(load, "unspool"):  # another Triton, or done already
        return
    lock = threading.Lock()

    def load_alone(name: str, path: str) -> Any:
        with lock:
            return SimpleNamespace(**vars(load(name, path)))

    vars(load_alone)["unspool"] = True
    launchers._load_module_from_path = load_alone


load_launchers_one_by_one()
use_direct_driver()


@cache
def can_overlap() -> bool:
    """Whether kernels may be started before the one they read from has ended: on Hopper and later."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= HOPPER


@cache
def is_hopper() -> bool:
    """Whether the GPU is of the generation whose own instructions some kernels use, and were measured on."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == HOPPER


def launch_options() -> dict[str, Any]:
    """The options for every launch of a kernel that calls `wait_for_input`."""
    return {"PDL": True, "launch_pdl": True} if can_overlap() else {"PDL": False}


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, cluster: int = 1, **options: Any) -> None:
    """Launch a kernel; inside `compile_ahead`, only compile it.

    In a cluster are `cluster` neighbours along the first axis; the grid counts clusters there.
    """
    take = _state.take
    if take is not None:
        take((kernel, grid, args, options))
        return
    wait_for_preparations()
    overlaps, _state.overlaps = _state.overlaps, True
    key = relaunch(kernel, grid, args, cluster, options, overlaps=overlaps)
    if key is None:
        return
    if not overlaps:
        raise OverlapError("the kernel was not launched before with such arguments")
    if _under_way:
        _await_variants(kernel)  # compiling it here as well would take longer
    if cluster > 1:
        # Triton's own clusters share the tensors of one program. Ours are programs of one each, so that a kernel is
        # compiled as usual, and only launched as if it had so many.
        made = kernel.warmup(*args, grid=grid, **options)
        warps, _, *rest = made.packed_metadata
        made.packed_metadata = (warps, cluster, *rest)
    remember(key, kernel, kernel[grid](*args, **options), len(args), options)


@contextmanager
def start_alone() -> Iterator[None]:
    """Let the first kernel inside start once all before it have ended; `OverlapError` if it can't.

    What a kernel does not wait for was written by kernels long before it, with which it never overlaps. That holds for
    those of one step: between two steps something must keep them apart.
    """
    _state.overlaps = False
    try:
        yield
        if not _state.overlaps:
            raise OverlapError("no kernel was launched")
    finally:
        _state.overlaps = True


def _forget(_module: object) -> None:
    """In a forked child: nobody compiles any more."""
    _under_way.clear()
    _compilers.clear()


after_fork(sys.modules[__name__], _forget)


class _Compilers(ThreadPoolExecutor):
    """Threads that have a kernel compiled, and load it."""

    def __init__(self) -> None:
        count = min(_MOST_COMPILERS, max(_MOST_HERE, os.cpu_count() or 1))
        super().__init__(count, "unspool compiler")
        self._device = torch.cuda.current_device()
        self._here = threading.Semaphore(_MOST_HERE)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        def work() -> Any:
            compile_elsewhere(fn)
            with self._here:
                kernel = fn(*args, **kwargs)  # from Triton's cache, if it was compiled elsewhere
            with suppress(Exception), torch.cuda.device(self._device):  # the first launch raises it again
                _ = kernel.run
            return kernel

        return super().submit(work)


def can_compile_ahead() -> bool:
    """Whether this Triton compiles without launching, for a GPU that is there."""
    return hasattr(triton, "AsyncCompileMode") and torch.cuda.is_available()


@contextmanager
def compile_ahead() -> Iterator[None]:
    """Compile the kernels that are launched inside, all in parallel, and start none of them.

    The first step on a machine would otherwise compile some ten kernels one after the other.
    """
    if not can_compile_ahead():
        yield
        return
    begun: list[tuple[Any, Any]] = []

    def compile_one(launched: Launched) -> None:
        kernel, grid, args, options = launched
        variant = kernel.warmup(*args, grid=grid, **options)
        if hasattr(variant, "future"):
            begun.append((kernel, variant))
            _under_way.append(begun[-1])

    _state.take = compile_one
    try:
        # A kernel that can't be compiled raises where it is launched: an error here would leave Triton in this mode.
        with _Compilers() as threads, triton.AsyncCompileMode(threads, ignore_errors=True):
            yield
    finally:
        _state.take = None
        _end(begun)


class _Asked:
    """What stands for the variants of a kernel until each of them is known."""

    def __init__(self) -> None:
        self.is_known = threading.Event()

    def result(self, ignore_errors: bool = False) -> None:  # noqa: ARG002 - as of Triton's variants
        """Return once they are."""
        self.is_known.wait()


def _await_variants(kernel: Any) -> None:
    """Return once none of a kernel's variants is being compiled."""
    awaited: list[Any] = []
    while found := [one for other, one in list(_under_way) if other is kernel and one not in awaited]:
        for variant in found:
            variant.result(ignore_errors=True)
        awaited += found


def _end(begun: list[tuple[Any, Any]]) -> None:
    for one in begun:
        _under_way.remove(one)


def compile_beside(work: Callable[[], object]) -> None:
    """Compile what `work` launches on the meta device in other threads, the longest kernels first.

    What it launches is known on return: from then on, whoever launches one of these kernels waits for it. If `work`
    fails, kernels are left to those who launch them.
    """
    if not can_compile_ahead():
        return
    launched = _list_launches(work)
    device, asked = torch.cuda.current_device(), _Asked()
    begun = [(kernel, asked) for kernel in {id(one[0]): one[0] for one in launched}.values()]
    _under_way.extend(begun)

    def run() -> None:
        try:
            with suppress(Exception), torch.cuda.device(device), torch.inference_mode(), compile_ahead():
                for kernel, grid, args, options in launched:
                    launch(kernel, grid, *args, **options)
                asked.is_known.set()
        finally:
            asked.is_known.set()
            _end(begun)
            end_short_turns()
            _compilers.discard(threading.current_thread())

    thread = threading.Thread(target=run, name="unspool kernels", daemon=True)
    begin_short_turns()
    _compilers.add(thread)
    thread.start()


def _list_launches(work: Callable[[], object]) -> list[Launched]:
    """What `work` launches, the longest kernels first; nothing if it fails."""
    launched: list[Launched] = []
    _state.take = launched.append
    try:
        with torch.inference_mode():
            work()
    except Exception:
        return []
    finally:
        _state.take = None
    return sorted(launched, key=lambda one: -len(getattr(one[0], "src", "")))


def wait_for_compilers() -> None:
    """Return once nothing is compiled beside."""
    wait_for_preparations()
    for thread in list(_compilers):
        if thread is not threading.current_thread():
            thread.join()


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
