"""What a route that generates text is made of: reading a body, and writing answers, errors and events."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Protocol

from unspool.server.orders import Order, Target
from unspool.server.refusals import RequestError
from unspool.server.tokens import ClientTokens
from unspool.server.work import Choice, Work


@dataclass(frozen=True)
class Reply:
    """What writing an answer needs beside the answer itself."""

    order: Order
    texts: ClientTokens
    fingerprint: str


class Dialect(Protocol):
    """One way to ask for text and to answer."""

    media_type: str  # of a stream

    def read(self, body: Any, target: Target) -> Order:
        """The order that a body asks for; raises RequestError."""
        ...

    def write(self, reply: Reply, choices: list[Choice], work: Work) -> dict[str, Any]:
        """The body of a whole answer."""
        ...

    def events(self, reply: Reply, work: Work) -> AsyncIterator[bytes]:
        """A stream's events, as they are sent."""
        ...

    def write_error(self, error: RequestError) -> dict[str, Any]:
        """The body of an error."""
        ...

    def write_late_error(self, error: RequestError, num_sent: int, /) -> bytes:
        """An error after a stream's beginning, as an event behind so many others."""
        ...
