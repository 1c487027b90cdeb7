"""The base of all streamers, and what iterator streamers share: ending with an error, and cancelling."""

from __future__ import annotations

import threading
from typing import Any, Protocol

import torch

from unspool.errors import SettingError
from unspool.forks import make_lock
from unspool.numeric import is_number


class DecodingTokenizer(Protocol):
    """The one method that a streamer needs from a tokenizer, unspool's or another."""

    def decode(self, token_ids: Any, /, **kwargs: Any) -> Any:
        """The text of the ids."""
        ...


class StreamCancelled(Exception):  # noqa: N818 - a signal to stop cleanly, no error
    """The reader of a stream is gone: the producer stops, which is not an error."""


class BaseStreamer:
    """The base of all streamers: `put` receives tokens as they are chosen, `end` is called after the last."""

    def put(self, value: torch.Tensor) -> None:
        """Receive the prompt's tokens (first call), then the newly emitted ones."""
        raise NotImplementedError(f"{type(self).__name__} must define put()")

    def end(self) -> None:
        """Receive the end of the generation."""
        raise NotImplementedError(f"{type(self).__name__} must define end()")


class Failure:
    """An error that a queue carries from the generating thread to the reader."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


class Cancellation:
    """Whether the reader of a stream wants no more; safe to use from two threads."""

    def __init__(self) -> None:
        self._lock = make_lock(self, "_lock")
        self._is_cancelled = False
        self._is_ended = False

    def cancel(self) -> None:
        """Ask the producer to stop. Does nothing if it already ended, so that a later use is not cancelled."""
        with self._lock:
            self._is_cancelled = not self._is_ended

    def check(self) -> None:
        """Raise StreamCancelled in the producer's thread if the reader wants no more."""
        with self._lock:
            self._is_ended = False
            if self._is_cancelled:
                raise StreamCancelled("the reader of this stream cancelled it")

    def end(self) -> None:
        """The producer is done; the streamer may be used for another generation."""
        with self._lock:
            self._is_cancelled = False
            self._is_ended = True


def check_timeout(timeout: float | None) -> float | None:
    """The timeout; raises if a queue can't wait for it."""
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise SettingError(f"timeout={timeout!r} is not a number of seconds; give seconds, or None to wait for ever")
    if not is_number(timeout) or not 0 <= timeout <= threading.TIMEOUT_MAX:
        raise SettingError(
            f"timeout={timeout!r} can't be waited for; give seconds from 0 to {threading.TIMEOUT_MAX:.0f}, "
            "or None to wait for ever"
        )
    return timeout
