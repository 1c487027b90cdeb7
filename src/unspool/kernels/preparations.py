"""Kernels that are about to be compiled beside: whoever would launch one waits until it is known to be under way.

Threads that do little between their waits take short turns with the others meanwhile. This stands apart from the
kernels, because importing Triton is part of what is waited for.
"""

from __future__ import annotations

import sys
import threading
from typing import Final

from unspool.forks import after_fork, make_lock

_LONGEST: Final = 30.0  # seconds
_SHORT_TURN: Final = 2e-4  # seconds that a thread may keep Python's lock
_awaited: set[threading.Event] = set()
_turns_lock = make_lock(sys.modules[__name__], "_turns_lock")
_usual: list[float] = []  # how long a turn was before, once for each who wants short ones


def _forget(_module: object) -> None:
    """In a forked child: nobody prepares anything any more."""
    _awaited.clear()
    if _usual:
        sys.setswitchinterval(_usual[0])
        _usual.clear()


after_fork(sys.modules[__name__], _forget)


def announce_preparation() -> threading.Event:
    """Let launches wait until `end_preparation` is called with what is returned."""
    event = threading.Event()
    _awaited.add(event)
    return event


def end_preparation(event: threading.Event) -> None:
    """Let those who wait go on."""
    _awaited.discard(event)
    event.set()


def wait_for_preparations() -> None:
    """Return once everything that was announced is under way."""
    if _awaited:
        for event in list(_awaited):
            event.wait(_LONGEST)


def begin_short_turns() -> None:
    """Let no thread keep Python's lock for long: one that reads a file piece by piece would wait at every piece."""
    with _turns_lock:
        _usual.append(_usual[0] if _usual else sys.getswitchinterval())
        sys.setswitchinterval(min(_SHORT_TURN, _usual[0]))


def end_short_turns() -> None:
    """Give turns their usual length again, once nobody wants short ones."""
    with _turns_lock:
        usual = _usual.pop()
        if not _usual:
            sys.setswitchinterval(usual)
