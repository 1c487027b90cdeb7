"""Requests on their way from those who submit them to the driving thread."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from unspool.engine.tasks import Task

_QUIET: Final = 0.0005  # seconds in which nobody submits after which an idle engine begins,
_LONGEST_WAIT: Final = 0.03  # and after which it does so in any case
_LONGEST_HOLD: Final = 0.05  # seconds that whoever submits gives way to launches


class Inbox:
    """New requests and the numbers of those that were cancelled, in order; `changed` is its lock.

    Submitting and driving share Python's one interpreter. So requests that come together are gathered before an idle
    engine begins, without waking it for each; and whoever submits gives way while prompts are launched on a GPU, which
    is then busy for longer than launching took.
    """

    def __init__(self, tokens_per_pass: int) -> None:
        self.changed = threading.Condition()
        self.is_closing = False
        self._most = tokens_per_pass
        self._incoming: deque[Task] = deque()
        self._cancelled: deque[int] = deque()
        self._num_tokens = 0  # of the incoming prompts
        self._num_asking = 0  # those who are about to submit
        self._is_gathering = False
        self._is_free = threading.Event()  # nothing is being launched
        self._is_free.set()
        self._holder = 0  # the thread that launches

    def __len__(self) -> int:
        return len(self._incoming)

    def leave(self) -> None:
        """In a forked child: no thread takes what is put here, and none holds what is waited for."""
        self.changed, self.is_closing = threading.Condition(), True
        self._is_free = threading.Event()
        self._is_free.set()
        self._num_asking, self._is_gathering = 0, False

    @property
    def has_mail(self) -> bool:
        """Whether there is something to take."""
        return bool(self._incoming or self._cancelled)

    # --- who submits -------------------------------------------------------------------------------------------
    @contextmanager
    def asking(self) -> Iterator[None]:
        """Somebody submits a request."""
        if not self._is_free.is_set() and threading.get_ident() != self._holder:
            self._is_free.wait(_LONGEST_HOLD)
        with self.expecting():
            yield

    @contextmanager
    def expecting(self) -> Iterator[None]:
        """Somebody is about to submit a request: an idle engine waits for it before it begins."""
        with self.changed:
            self._num_asking += 1
        try:
            yield
        finally:
            with self.changed:
                self._num_asking -= 1

    def put(self, task: Task) -> None:
        """Add a request; the caller holds the lock."""
        self._incoming.append(task)
        self._num_tokens += task.entry.unread * task.entry.num_prompts
        if not self._is_gathering or self._num_tokens >= self._most:
            self.changed.notify()

    def cancel(self, number: int) -> None:
        """Have a request ended."""
        with self.changed:
            self._cancelled.append(number)
            self.changed.notify()

    # --- the driving thread --------------------------------------------------------------------------------------
    def wait(self, *, is_busy: bool) -> bool:
        """Wait until there is something to do; False when the engine is closed."""
        with self.changed:
            while not (self.is_closing or self.has_mail or is_busy):
                self.changed.wait()
            if not is_busy:
                self._gather(0)
            return not self.is_closing

    def gather(self, num_unread: int) -> None:
        """Wait for those who are submitting, while a device is busy anyway; so many tokens are to be read already."""
        with self.changed:
            if self._num_asking or self._incoming:
                self._gather(num_unread)

    def _gather(self, num_unread: int) -> None:
        """Let requests that come together be read together: a pass over a few tokens takes about as long as one over
        many, and whoever submits the next would wait for it."""
        until, count = time.monotonic() + _LONGEST_WAIT, -1
        most = self._most - num_unread
        self._is_gathering = True
        try:
            while not self.is_closing and self._num_tokens < most and time.monotonic() < until:
                if len(self._incoming) == count and not self._num_asking:
                    return  # nobody has come for a while, and nobody is about to
                count = len(self._incoming)
                self.changed.wait(_QUIET)
        finally:
            self._is_gathering = False

    def take_all(self) -> tuple[list[Task], list[int]]:
        """The new requests, and the numbers of those that were cancelled."""
        if not self.has_mail:
            return [], []
        with self.changed:
            incoming, cancelled = list(self._incoming), list(self._cancelled)
            self._incoming.clear()
            self._cancelled.clear()
            self._num_tokens = 0
        return incoming, cancelled

    def hold(self) -> None:
        """Have those who submit wait: prompts are being launched."""
        self._holder = threading.get_ident()
        self._is_free.clear()

    def let_in(self) -> None:
        """End a hold."""
        if not self._is_free.is_set():
            self._is_free.set()
