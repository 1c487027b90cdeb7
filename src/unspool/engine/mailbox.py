"""From the driving thread to whoever reads a request: a thread that waits, or a task of an event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from contextlib import suppress
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Items in order, then an end, with an error or without."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._changed = threading.Condition(threading.Lock())
        self._num_waiting = 0
        self._waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
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

    def _wake(self) -> None:
        if self._num_waiting:
            self._changed.notify_all()
        if self._waiters:
            waiters, self._waiters = self._waiters, []
            for loop, future in waiters:
                with suppress(RuntimeError):  # the loop is closed: nobody waits there any more
                    loop.call_soon_threadsafe(_resolve, future)

    def get(self, timeout: float | None = None) -> T | None:
        """The next item; None after the last. Raises the error that it ended with, or TimeoutError."""
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
        while True:
            loop = asyncio.get_running_loop()
            waiter = (loop, loop.create_future())
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


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
