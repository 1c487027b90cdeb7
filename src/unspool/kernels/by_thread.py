"""Device memory kept for a thread's next work (buffers, captured graphs), which goes when the thread has ended."""

from __future__ import annotations

from typing import Any, Final, Protocol
from weakref import WeakSet


class Keeper(Protocol):
    """Who keeps something for threads."""

    def forget_thread(self, thread: int) -> None:
        """Let go of what was made for the thread of that number."""
        ...


_keepers: Final[WeakSet[Any]] = WeakSet()


def note_keeper(keeper: Keeper) -> None:
    """Let it know when a thread will not come back; it is held weakly."""
    _keepers.add(keeper)


def forget_thread(thread: int) -> None:
    """Let go of all that was made for a thread."""
    for keeper in list(_keepers):
        keeper.forget_thread(thread)
