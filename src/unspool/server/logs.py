"""The log: one JSON object per line, without prompts, answers or keys."""

from __future__ import annotations

import logging
import re
import sys
import time
import traceback
import uuid
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, TextIO

import msgspec

_NAME: Final = re.compile(r"[A-Za-z0-9._:+/=-]{1,128}")
_LONGEST_MESSAGE: Final = 1000  # of what libraries log


@dataclass
class RequestRecord:
    """What is known of a request while it is at work."""

    id: str
    method: str
    path: str
    client: str = ""  # its address
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


current: Final[ContextVar[RequestRecord | None]] = ContextVar("unspool_request", default=None)
"""The request that is at work here, if any."""


def choose_id(given: str | None) -> str:
    """A request's id: what a client or a proxy has sent as x-request-id, if it can be one."""
    return given if given is not None and _NAME.fullmatch(given) else uuid.uuid4().hex


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
        except (OSError, ValueError):  # its reader is gone
            self._is_on = False

    def take_over(self) -> Callable[[], None]:
        """Write what libraries log, and warnings, as lines of this log too; returns what ends that."""
        handler, root, own = _Handler(self), logging.getLogger(), logging.getLogger("unspool")
        others = [one for one in own.handlers if isinstance(one, logging.NullHandler)]
        for one in others:
            own.removeHandler(one)
        root.addHandler(handler)
        logging.captureWarnings(True)

        def stop() -> None:
            root.removeHandler(handler)
            logging.captureWarnings(False)
            for one in others:
                own.addHandler(one)

        return stop

    def write_request(self, record: RequestRecord) -> None:
        """The line of a request that has ended."""
        self.write(
            "request",
            id=record.id,
            method=record.method or None,
            path=record.path[:256] or None,
            client=record.client or None,
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


class _Handler(logging.Handler):
    """Hands what is logged to a Log, with the request at work."""

    def __init__(self, log: Log) -> None:
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line."""
        request, error = current.get(), record.exc_info[1] if record.exc_info else None
        try:
            message = record.getMessage()
        except Exception:  # its arguments do not fit
            message = str(record.msg)
        self._log.write(
            "log",
            id=None if request is None else request.id,
            client=None if request is None else request.client or None,
            level=record.levelname.lower(),
            logger=record.name,
            message=message.partition("\n")[0][:_LONGEST_MESSAGE],  # what follows may quote a prompt
            error=None if error is None else type(error).__name__,
            frames=None if error is None else _list_frames(error),
        )


def _list_frames(error: BaseException) -> list[str]:
    """Where an error was raised. Its message is left out: it may quote a prompt."""
    return [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in traceback.extract_tb(error.__traceback__)]
