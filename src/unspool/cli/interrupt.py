"""Ctrl-c as a request: stop after this step, instead of an exception in the middle of one."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class Interrupt:
    """While it is entered, the first ctrl-c sets `is_asked` and the second one raises KeyboardInterrupt."""

    def __init__(self, *, is_enabled: bool = True) -> None:
        # Python lets only the main thread handle signals.
        self._is_enabled = is_enabled and threading.current_thread() is threading.main_thread()
        self._before: Any = None
        self.is_asked = False

    def __enter__(self) -> Interrupt:
        if self._is_enabled:
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_enabled:
            signal.signal(signal.SIGINT, self._before)

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        if self.is_asked:
            raise KeyboardInterrupt
        self.is_asked = True
