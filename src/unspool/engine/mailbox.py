"""From the driving thread to whoever reads a request: a thread that waits, or a task of an event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from contextlib import suppress
from typing import Any, Final, Generic, TypeVar
from weakref import WeakKeyDictionary, ref

T = TypeVar("T")
_MOST_AT_ONCE: Final = 16  # tasks of a loop that are woken in one of its rounds
_SECONDS_A_WAKE: Final = 1.5e-4  # a thread that is woken needs the interpreter for about half as long
_FEWEST_WAKES: Final = 8  # that a step has in any case
_MOST_WAKES: Final = 256  # that can be saved up


class _Bell:
    """Wakes the tasks of one event loop: all that are to be woken before it looks, at once.

    To wake a loop from another thread is a call of the system; so a step that writes to many streams makes one.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._find_loop = ref(loop)  # it holds its bell, not the other way round
        self._futures: deque[asyncio.Future[None]] = deque()
        self._is_rung = False

    def ring(self, future: asyncio.Future[None]) -> None:
        """Resolve a future in the loop; for any thread."""
        self._futures.append(future)  # before it is asked whether the loop will look
        if not self._is_rung:
            self._is_rung = True
            loop = self._find_loop()
            try:
                if loop is not None:
                    loop.call_soon_threadsafe(self._answer)
            except RuntimeError:  # the loop is closed: nobody waits there any more
                self._futures.clear()

    def _answer(self) -> None:
        self._is_rung = False  # before the futures are taken
        for _ in range(min(len(self._futures), _MOST_AT_ONCE)):
            future = self._futures.popleft()
            if not future.done():
                future.set_result(None)
        loop = self._find_loop()
        if self._futures and loop is not None:  # between two rounds of a loop other threads get the interpreter
            self._is_rung = True
            loop.call_soon(self._answer)


_BELLS: Final[WeakKeyDictionary[asyncio.AbstractEventLoop, _Bell]] = WeakKeyDictionary()


def _find_bell(loop: asyncio.AbstractEventLoop) -> _Bell:
    """The bell of a loop; only its own thread asks."""
    bell = _BELLS.get(loop)
    if bell is None:
        bell = _BELLS[loop] = _Bell(loop)
    return bell


class Mailbox(Generic[T]):
    """Items in order, then an end, with an error or without."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._changed = threading.Condition(threading.Lock())
        self._num_waiting = 0
        self._waiters: list[tuple[_Bell, asyncio.Future[None]]] = []
        self._ended = threading.Event()
        self.is_closed = False
        self._error: BaseException | None = None

    def put(self, *items: T) -> None:
        """Add items; ignored after the end. For one thread alone: the lock is taken only if somebody waits.

        Readers say that they wait before they look, so none is missed.
        """
        if not self.is_closed:
            self._items.extend(items)
            if self._num_waiting or self._waiters:
                with self._changed:
                    self._wake()

    def close(self, error: BaseException | None = None) -> bool:
        """Let readers know that there is no more; whether this was the first to say so."""
        with self._changed:
            if self.is_closed:
                return False
            self.is_closed, self._error = True, error
            self._ended.set()
            self._wake()
            return True

    def leave(self, error: BaseException) -> None:
        """In a forked child: no thread writes to it any more. What it had ended with stays."""
        self._changed, self._num_waiting, self._waiters = threading.Condition(threading.Lock()), 0, []
        is_closed = self.is_closed
        self._ended = threading.Event()
        self._ended.set()
        if not is_closed:
            self.is_closed, self._error = True, error

    def push(self, *items: T) -> bool:
        """`put` for a writer that wakes readers later: whether a thread waits, and is to be woken (`wake`). Tasks are
        woken at once: their loop looks once for all of them."""
        if self.is_closed:
            return False
        self._items.extend(items)
        if self._waiters:
            with self._changed:
                self._ring()
        return self._num_waiting > 0

    def wake(self) -> None:
        """Wake the threads that wait."""
        with self._changed:
            self._wake()

    def _wake(self) -> None:
        if self._num_waiting:
            self._changed.notify_all()
        self._ring()

    def _ring(self) -> None:
        if self._waiters:
            waiters, self._waiters = self._waiters, []
            for bell, future in waiters:
                bell.ring(future)

    def get(self, timeout: float | None = None) -> T | None:
        """The next item; None after the last. Raises the error that it ended with, or TimeoutError."""
        with suppress(IndexError):
            return self._items.popleft()
        until = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            self._num_waiting += 1
            try:
                while not self._items and not self.is_closed:
                    left = None if until is None else until - time.monotonic()
                    if left is not None and left <= 0:
                        raise TimeoutError(f"nothing came within {timeout} seconds; the request goes on")
                    self._changed.wait(left)
            finally:
                self._num_waiting -= 1
            return self._take()

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the end; raises TimeoutError."""
        if not self._ended.wait(timeout):
            raise TimeoutError(f"the request did not end within {timeout} seconds; it goes on")

    def clear(self) -> None:
        """Forget the items that nobody has taken; raises the error that it ended with."""
        with self._changed:
            self._items.clear()
            if self._error is not None:
                raise self._error

    async def get_async(self) -> T | None:
        """`get` for a task of an event loop."""
        with suppress(IndexError):
            return self._items.popleft()
        while True:
            loop = asyncio.get_running_loop()
            waiter = (_find_bell(loop), loop.create_future())
            with self._changed:
                self._waiters.append(waiter)
                if self._items or self.is_closed:
                    self._waiters.remove(waiter)
                    return self._take()
            await waiter[1]

    def _take(self) -> T | None:
        if self._items:
            return self._items.popleft()
        if self._error is not None:
            raise self._error
        return None


class Usher:
    """Wakes the threads that wait for items of many mailboxes: those that have waited longest first, and no more at a
    time than leave the interpreter to the thread that writes. Items of the others gather, and are taken together."""

    def __init__(self) -> None:
        self._due: deque[Mailbox[Any]] = deque()
        self._known: set[int] = set()
        self._looked_at = time.monotonic()
        self._allowed = 0.0

    def add(self, box: Mailbox[Any]) -> None:
        """Note that a reader is to be woken; for the writing thread alone, as all of this is."""
        if id(box) not in self._known:
            self._known.add(id(box))
            self._due.append(box)

    def wake(self, *, everybody: bool = False) -> None:
        """Wake as many as there is time for since the last look, or everybody."""
        if not self._due:
            return
        now = time.monotonic()
        self._allowed = min(_MOST_WAKES, self._allowed + (now - self._looked_at) / _SECONDS_A_WAKE)
        self._looked_at = now
        count = len(self._due) if everybody else min(len(self._due), max(_FEWEST_WAKES, int(self._allowed)))
        self._allowed = max(0.0, self._allowed - count)
        for _ in range(count):
            box = self._due.popleft()
            self._known.discard(id(box))
            box.wake()
