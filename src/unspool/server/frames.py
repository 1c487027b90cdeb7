"""The frames of server-sent events."""

from __future__ import annotations

from typing import Any, Final

import msgspec

DONE: Final = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


def frame(value: Any, event: str | None = None) -> bytes:
    """One event with a JSON value."""
    data = b"data: " + _encode(value) + b"\n\n"
    return data if event is None else b"event: " + event.encode() + b"\n" + data
