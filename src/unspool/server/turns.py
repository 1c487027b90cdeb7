"""Costly work of requests (long bodies, hard grammars) in threads of its own, in which clients take turns.

What is quick never waits for it. A client's jobs wait behind its own, and no client has all of the threads.
"""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, TypeVar

from unspool.server.options import ClientLimits
from unspool.server.refusals import RequestError

T = TypeVar("T")

LARGE: Final = 32 << 10  # bytes of a body with which a request is costly
GRAMMAR_WEIGHT: Final = 1 << 20  # what a grammar weighs beside bodies, whose weight is their bytes
_TRIM_AFTER: Final = 8 << 20  # weight of jobs after which memory is given back before the queue is empty
_TRIM_EVERY: Final = 1.0  # seconds
_IDLE_SECONDS: Final = 10.0  # after which a thread without work ends


@dataclass(eq=False)
class _Job:
    client: Hashable
    work: Callable[[], Any]
    done: asyncio.Future[Any]
    loop: asyncio.AbstractEventLoop
    discard: Callable[[Any], None] | None  # what is done with a result whose caller has left


class Turns:
    """A queue of jobs with a place for every client, and the few threads that do them."""

    def __init__(self, limits: ClientLimits, threads: int | None = None) -> None:
        self._limits = limits
        self._most_threads = threads or max(3, min(8, (os.cpu_count() or 1) // 2))
        self._lock = threading.Condition(threading.Lock())
        self._waiting: OrderedDict[Hashable, deque[_Job]] = OrderedDict()  # the client whose turn it is first
        self._running: dict[Hashable, int] = {}  # jobs at work
        self._weights: dict[Hashable, int] = {}  # of what waits or is at work
        self._num_threads = self._num_idle = 0
        self._weight_done, self._trimmed_at = 0, 0.0

    def check(self, client: Hashable, weight: int) -> None:
        """Raise 429 if there is no room for so much costly work of a client."""
        with self._lock:
            self._check(client, weight)

    def _check(self, client: Hashable, weight: int) -> None:
        held, total = self._weights.get(client, 0), sum(self._weights.values())
        if held and held + weight > self._limits.costly_bytes_per_client:
            raise _refuse("this client has as many long bodies and hard grammars at work as it may have")
        if total and total + weight > self._limits.costly_bytes:
            raise _refuse("the server has as many long bodies and hard grammars at work as it takes")

    @contextmanager
    def enter(self, client: Hashable, weight: int) -> Iterator[None]:
        """Count the costly work of a request, which may be several jobs; raises 429 where there is too much."""
        with self._lock:
            self._check(client, weight)
            self._weights[client] = self._weights.get(client, 0) + weight
        try:
            yield
        finally:
            with self._lock:
                self._weights[client] -= weight
                if not self._weights[client]:
                    del self._weights[client]
                self._weight_done += weight
                is_due = not self._weights
                if is_due:
                    self._lock.notify()  # a thread that waits gives memory back

    async def run(self, client: Hashable, work: Callable[[], T], discard: Callable[[T], None] | None = None) -> T:
        """Do some work in this client's turn; when this is cancelled, not at all, or `discard` gets its result."""
        loop = asyncio.get_running_loop()
        context = contextvars.copy_context()
        job = _Job(client, lambda: context.run(work), loop.create_future(), loop, discard)
        with self._lock:
            self._waiting.setdefault(client, deque()).append(job)
            if self._num_idle:
                self._lock.notify()
            elif self._num_threads < self._most_threads:
                self._num_threads += 1
                threading.Thread(target=self._serve, name="unspool-costly", daemon=True).start()
        try:
            result: T = await job.done
            return result
        finally:
            self._forget(job)

    def _forget(self, job: _Job) -> None:
        """Take a job out of the queue if it still waits there."""
        with self._lock:
            queue = self._waiting.get(job.client)
            if queue is not None and job in queue:
                queue.remove(job)
                if not queue:
                    del self._waiting[job.client]

    # --- the threads -----------------------------------------------------------------------------------------------
    def _serve(self) -> None:
        """Do jobs until none has come for a while."""
        while (job := self._take()) is not None:
            try:
                result, error = job.work(), None
            except BaseException as raised:
                result, error = None, raised
            with self._lock:
                self._running[job.client] -= 1
                if not self._running[job.client]:
                    del self._running[job.client]
                self._lock.notify()  # a job of this client may have waited for its end
            _tell(job, result, error)
            del job, result, error  # a thread that waits holds no memory
            self._give_back()

    def _take(self) -> _Job | None:
        """The next job; None when there was nothing to do for a while."""
        until = time.monotonic() + _IDLE_SECONDS
        while True:
            with self._lock:
                job = self._choose()
                left = until - time.monotonic()
                if job is not None:
                    return job
                if left <= 0:
                    self._num_threads -= 1
                    return None
                self._num_idle += 1
                try:
                    self._lock.wait(left)
                finally:
                    self._num_idle -= 1
                job = self._choose()
            if job is not None:
                return job
            self._give_back()

    def _choose(self) -> _Job | None:
        """The first job of the next client that has a thread left."""
        most = max(1, self._most_threads - 1)
        for client, queue in self._waiting.items():
            if self._running.get(client, 0) < most:
                job = queue.popleft()
                if queue:
                    self._waiting.move_to_end(client)
                else:
                    del self._waiting[client]
                self._running[client] = self._running.get(client, 0) + 1
                return job
        return None

    def _give_back(self) -> None:
        """Return what is left of large bodies to the system, when nothing is at work or much has been done."""
        with self._lock:
            now = time.monotonic()
            is_due = self._weight_done >= _TRIM_AFTER and now - self._trimmed_at >= _TRIM_EVERY
            if not self._weight_done or (self._weights and not is_due):
                return
            self._weight_done, self._trimmed_at = 0, now
        give_back_memory()


def _tell(job: _Job, result: Any, error: BaseException | None) -> None:
    def settle() -> None:
        if job.done.done():
            if error is None and job.discard is not None:
                job.discard(result)
            return
        if error is not None:
            job.done.set_exception(error)
        else:
            job.done.set_result(result)

    with suppress(RuntimeError):  # the loop has ended
        job.loop.call_soon_threadsafe(settle)


def _refuse(why: str) -> RequestError:
    return RequestError(429, f"{why}; try again", code="too_many_requests", retry_after=2)


@lru_cache(maxsize=1)
def _find_trim() -> Callable[[int], int] | None:
    """glibc's malloc_trim; None where there is none."""
    try:
        found = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):
        return None
    found.argtypes, found.restype = [ctypes.c_size_t], ctypes.c_int
    return found


def give_back_memory() -> None:
    """Return memory that is free in this process to the system, which the allocator keeps otherwise."""
    trim = _find_trim()
    if trim is not None:
        trim(0)
