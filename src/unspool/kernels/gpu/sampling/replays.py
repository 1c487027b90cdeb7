"""Kernels over fixed buffers, launched as one CUDA graph: for a few rows the host takes longer to launch ten kernels
than the device to run them.
"""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Final, Generic, TypeVar

import torch

from unspool.forks import make_lock
from unspool.kernels.by_thread import note_keeper

MOST_KEPT: Final = 4  # sets of buffers that are kept for reuse, of one kind
RUNS_BEFORE: Final = 3  # launches one by one before a graph is made: it costs as much as twenty
Held = TypeVar("Held")
_capturing = make_lock(sys.modules[__name__], "_capturing")  # one capture at a time


class Replay:
    """Work on fixed buffers: launched kernel by kernel at first, then as a graph."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._graph: torch.cuda.CUDAGraph | None = None
        self._num_runs = 0

    def run(self) -> None:
        """Launch the work."""
        if self._graph is not None:
            self._graph.replay()
            return
        self._num_runs += 1
        if self._num_runs <= RUNS_BEFORE or not torch.cuda.is_available():
            self._work()
            return
        self._graph = _capture(self._work)
        self._graph.replay()


def _capture(work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """A graph of kernels that have run before. Nothing is waited for: they take no memory of their own."""
    graph, here = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    beside = torch.cuda.Stream()
    beside.wait_stream(here)
    with _capturing, torch.cuda.stream(beside):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            work()
        finally:
            graph.capture_end()
    here.wait_stream(beside)
    return graph


def can_replay(device: torch.device) -> bool:
    """Whether a graph may be launched now: on a GPU, and not inside the capture of another."""
    return device.type == "cuda" and not torch.cuda.is_current_stream_capturing()


class KeptReplays(Generic[Held]):
    """What was made for a shape, by thread and stream: its buffers are written again by its next run there."""

    def __init__(self, most: int = MOST_KEPT) -> None:
        self._most = most
        self._kept: OrderedDict[tuple[Hashable, torch.device, int, int], Held] = OrderedDict()
        self._lock = make_lock(self, "_lock")
        note_keeper(self)

    def forget_thread(self, thread: int) -> None:
        """Let go of a thread's."""
        with self._lock:
            for key in [key for key in self._kept if key[-1] == thread]:
                del self._kept[key]

    def lend(self, shape: Hashable, device: torch.device, make: Callable[[], Held]) -> Held:
        """The same, or what is made anew where nothing can be kept: in a capture, and elsewhere than on a GPU."""
        return self.take(shape, device, make) if can_replay(device) else make()

    def take(self, shape: Hashable, device: torch.device, make: Callable[[], Held]) -> Held:
        """What was made for this shape; the one that was not used for longest goes if they become too many."""
        stream = torch._C._cuda_getCurrentRawStream(device.index or 0)
        key = (shape, device, stream, threading.get_ident())
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
                return found
        made = make()
        with self._lock:
            self._kept[key] = made
            while len(self._kept) > self._most:
                self._kept.popitem(last=False)
        return made
