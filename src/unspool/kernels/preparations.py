"""Kernels that are about to be compiled beside: whoever would launch one waits until it is known to be under way.

This stands apart from the kernels, because importing Triton is part of what is waited for.
"""

from __future__ import annotations

import threading
from typing import Final

_LONGEST: Final = 30.0  # seconds
_awaited: set[threading.Event] = set()


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
