"""The log: one JSON object per line, without prompts, answers or keys."""

from __future__ import annotations

import sys
import time
import traceback
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, TextIO

import msgspec


@dataclass
class RequestRecord:
    """What is known of a request while it is at work."""

    id: str
    method: str
    path: str
    started: float = field(default_factory=time.monotonic)
    status: int = 0
    key: int = 0  # the number of its key
    model: str | None = None
    prompt_tokens: int | None = None
    new_tokens: int | None = None
    first_token_seconds: float | None = None
    is_gone: bool = False  # its client closed the connection
    error: str | None = None  # the class of an error that is a bug, or the code of a refusal
    bug: BaseException | None = None


class Log:
    """Writes lines to a stream."""

    def __init__(self, kind: str, stream: TextIO | None = None) -> None:
        self._is_on, self._stream = kind != "none", stream

    def write(self, event: str, **values: Any) -> None:
        """One line; values that are None are left out."""
        if not self._is_on:
            return
        line = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": event}
        line |= {name: value for name, value in values.items() if value is not None}
        stream = self._stream if self._stream is not None else sys.stderr
        try:
            stream.write(msgspec.json.encode(line).decode() + "\n")
            stream.flush()
        except (OSError, ValueError):  # nobody reads it any more
            self._is_on = False

    def write_request(self, record: RequestRecord) -> None:
        """The line of a request that has ended."""
        self.write(
            "request",
            id=record.id,
            method=record.method,
            path=record.path[:256],
            status=record.status,
            seconds=round(time.monotonic() - record.started, 4),
            key=record.key or None,
            model=record.model,
            prompt_tokens=record.prompt_tokens,
            new_tokens=record.new_tokens,
            first_token_seconds=None if record.first_token_seconds is None else round(record.first_token_seconds, 4),
            disconnected=record.is_gone or None,
            error=record.error,
            frames=None if record.bug is None else _list_frames(record.bug),
        )


def _list_frames(error: BaseException) -> list[str]:
    """Where an error was raised. Its message is left out: it may quote a prompt."""
    return [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in traceback.extract_tb(error.__traceback__)]
