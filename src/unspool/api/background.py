"""A generator whose steps run in threads, for programs that must not wait for them."""

from __future__ import annotations

import threading
from collections.abc import Generator
from typing import Generic, TypeVar

from unspool.forks import make_lock

T = TypeVar("T")


class ThreadedSteps(Generic[T]):
    """A generator that any thread may advance, one at a time, and that may be closed at any moment.

    A generator can't be closed while it runs; a step that is running when `close()` is called closes it at its end.
    """

    def __init__(self, items: Generator[T, None, None]) -> None:
        self._items = items
        self._lock = make_lock(self, "_lock")  # held by the step that runs
        self._closing = threading.Event()

    def step(self) -> T | None:
        """The next item; None after the last one, and once it was closed."""
        with self._lock:
            if self._closing.is_set():
                return None
            try:
                return next(self._items, None)
            finally:
                if self._closing.is_set():
                    self._items.close()

    def close(self) -> None:
        """Stop the work: at once, or when the step that runs is done. Closing twice is fine."""
        self._closing.set()
        if self._lock.acquire(blocking=False):
            try:
                self._items.close()
            finally:
                self._lock.release()
