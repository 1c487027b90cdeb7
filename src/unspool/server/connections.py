"""Connections of clients: what comes over the wire is bounded before uvicorn's parser reads it.

A connection gives its parser one whole head, and then that request's body, so that neither parser ever joins what does
not end. It holds the next request back until the one at work is answered, and closes within a time whatever stalls.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Final, Protocol

import msgspec

from unspool.server.heads import ChunkReader, Head, HeadError, check_line, read_head
from unspool.server.logs import RequestRecord
from unspool.server.options import ClientLimits
from unspool.server.refusals import RequestError
from unspool.server.state import ServerState

_LINGER: Final = 3.0  # seconds in which a client may read an answer that came before its body's end
_REASONS: Final = {
    400: "Bad Request",
    405: "Method Not Allowed",
    408: "Request Timeout",
    414: "URI Too Long",
    417: "Expectation Failed",
    431: "Request Header Fields Too Large",
    501: "Not Implemented",
    503: "Service Unavailable",
    505: "HTTP Version Not Supported",
}


class _Parser(Protocol):
    """What uvicorn's protocols have, whichever parser they use."""

    app: Any
    cycle: Any

    def connection_made(self, transport: Any, /) -> None: ...
    def data_received(self, data: bytes, /) -> None: ...
    def eof_received(self) -> Any: ...
    def connection_lost(self, error: Exception | None, /) -> None: ...
    def pause_writing(self) -> None: ...
    def resume_writing(self) -> None: ...


class Connections:
    """The open connections of a server. When there are too many, one that asks for nothing makes room."""

    def __init__(self, state: ServerState, make_parser: Callable[..., Any]) -> None:
        self.limits: ClientLimits = state.options.limits
        self._state, self._make_parser = state, make_parser
        self._open: dict[Connection, None] = {}  # the oldest first

    def __len__(self) -> int:
        return len(self._open)

    def make(self, *_: Any, **named: Any) -> Connection:
        """A connection; uvicorn calls this for every one that is accepted."""
        return Connection(self, self._make_parser(**named))

    def add(self, connection: Connection) -> bool:
        """Count a connection; whether there was room for it."""
        if len(self._open) >= self.limits.connections:
            idle = [one for one in self._open if one.is_idle]
            if not idle:
                return False
            counts = Counter(one.address for one in idle)
            counts[connection.address] += 1
            address = max((one.address for one in idle), key=lambda one: counts[one])
            next(one for one in idle if one.address == address).drop()
        self._open[connection] = None
        return True

    def remove(self, connection: Connection) -> None:
        """Forget a connection that is closed."""
        self._open.pop(connection, None)

    def note(self, connection: Connection, record: RequestRecord) -> None:
        """Count and log a request that no route has seen."""
        record.client = connection.address
        self._state.note_end(record, "unknown")


class Connection(asyncio.Protocol):
    """One client's connection, in front of uvicorn's protocol."""

    def __init__(self, hub: Connections, parser: _Parser) -> None:
        self._hub, self._parser, self._limits = hub, parser, hub.limits
        self._app, parser.app = parser.app, self._run
        self._loop = asyncio.get_running_loop()
        self._transport: Any = None
        self.address = ""
        self._held = bytearray()  # what has come and not been read
        self._searched = 0  # bytes of it in which no head ends
        self._head: Head | None = None  # of the request at work
        self._left = 0  # bytes of its body
        self._chunks: ChunkReader | None = None
        self._is_over = False  # nothing more is read or written
        self._num_discarded = 0
        self._pauses: set[str] = set()  # who has stopped the reading
        self._timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    @property
    def is_idle(self) -> bool:
        """Whether no request is at work."""
        return self._head is None

    @property
    def _has_body(self) -> bool:
        """Whether the body of the request at work has not come to its end."""
        return self._left > 0 or self._chunks is not None

    # --- asyncio's calls -----------------------------------------------------------------------------------------
    def connection_made(self, transport: Any) -> None:
        """A client has connected."""
        self._transport = transport
        peer = transport.get_extra_info("peername")
        self.address = str(peer[0]) if isinstance(peer, tuple) and peer else ""
        self._parser.connection_made(Wire(self, transport))
        if self._hub.add(self):
            self._set_timer(self._limits.header_seconds, self._expire)
        else:
            self._refuse(HeadError(503, "the server has as many connections at work as it takes; try again"))

    def data_received(self, data: bytes) -> None:
        """Bytes have come."""
        if self._is_over:
            self._num_discarded += len(data)
            if self._num_discarded > self._limits.body_bytes:
                self._transport.abort()
            return
        if self._head is None and not self._held:
            self._set_timer(self._limits.header_seconds, self._expire)
        self._held += data
        self._advance()

    def eof_received(self) -> Any:
        """The client sends no more."""
        return self._parser.eof_received()

    def connection_lost(self, error: Exception | None) -> None:
        """The connection is closed."""
        self._is_over = True
        self._held.clear()
        for timer in (self._timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        self._hub.remove(self)
        self._parser.connection_lost(error)

    def pause_writing(self) -> None:
        """The client does not read what was sent."""
        self._parser.pause_writing()
        self._write_timer = self._loop.call_later(self._limits.send_seconds, self._transport.abort)

    def resume_writing(self) -> None:
        """It reads again."""
        if self._write_timer is not None:
            self._write_timer.cancel()
        self._parser.resume_writing()

    # --- requests ------------------------------------------------------------------------------------------------
    def _advance(self) -> None:
        """Read what has come, as far as it may be read now."""
        try:
            while self._held and not self._is_over:
                if self._head is None:
                    if not self._read_head():
                        return
                elif self._has_body:
                    for piece in self._read_body():
                        self._parser.data_received(piece)
                else:  # the next request, behind the one at work
                    if len(self._held) > self._limits.header_bytes:
                        self.pause("pipeline")
                    return
        except HeadError as error:
            self._refuse(error)

    def _read_head(self) -> bool:
        """Read a head if it is whole, and begin its request."""
        held = self._held
        if held.startswith(b"\r\n"):  # an empty line before a request is tolerated
            del held[:2]
            self._searched = 0
            return True
        if held == b"\r":
            return False
        check_line(held)
        end = held.find(b"\r\n\r\n", max(0, self._searched - 3), self._limits.header_bytes)
        if end < 0:
            if len(held) >= self._limits.header_bytes:
                raise HeadError(431, f"the headers have more than {self._limits.header_bytes} bytes")
            self._searched = len(held)
            return False
        head = read_head(bytes(held[:end]))
        del held[: end + 4]
        self._searched, self._head, self._left = 0, head, head.length
        self._chunks = ChunkReader() if head.is_chunked else None
        self._set_timer(None)
        self._parser.data_received(head.text)
        return True

    def _read_body(self) -> Iterator[bytes]:
        """Pieces of the body at work, in the form in which the parser expects them."""
        if self._chunks is None:
            piece = bytes(self._held[: self._left])
            del self._held[: self._left]
            self._left -= len(piece)
            yield piece
            return
        with memoryview(bytes(self._held)) as data:
            pieces, size = self._chunks.read(data)
        del self._held[:size]
        if whole := b"".join(pieces):
            yield b"%x\r\n%b\r\n" % (len(whole), whole)
        if self._chunks.is_done:
            self._chunks = None
            yield b"0\r\n\r\n"

    async def _run(self, scope: Any, receive: Any, send: Any) -> None:
        """The application, for one request."""

        async def answer(message: Any) -> None:
            if message["type"] == "http.response.start" and self._has_body:  # the rest of it will not be read
                message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
            await send(message)

        try:
            await self._app(scope, receive, answer)
        finally:
            self._loop.call_soon(self._finish)

    def _finish(self) -> None:
        """A request is answered: the next one, or none for a while."""
        if self._is_over or self._has_body or self._transport.is_closing():
            return
        self._head = None
        self._set_timer(self._limits.header_seconds if self._held else self._limits.idle_seconds, self._expire)
        self.resume("pipeline")
        self._advance()

    # --- its end -------------------------------------------------------------------------------------------------
    def _refuse(self, error: HeadError) -> None:
        """Answer what no route will see, and close."""
        record = RequestRecord(uuid.uuid4().hex, "" if self._head is None else self._head.method, "")
        record.status, record.error = error.status, "connection"
        has_begun = self._head is not None and self._parser.cycle is not None and self._parser.cycle.response_started
        if not has_begun:
            body = msgspec.json.encode(RequestError(error.status, str(error), code="connection").as_openai())
            head = (
                f"HTTP/1.1 {error.status} {_REASONS[error.status]}\r\nx-request-id: {record.id}\r\n"
                f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            self._transport.write(head.encode() + body)
        self._hub.note(self, record)
        self._linger()

    def _expire(self) -> None:
        """The next head has not come in time."""
        if self._held and not self._is_over:
            seconds = self._limits.header_seconds
            self._refuse(HeadError(408, f"the headers did not come within {seconds:g} seconds"))
        else:
            self.drop()

    def drop(self) -> None:
        """Close a connection on which nothing is at work."""
        self._is_over = True
        self._hub.remove(self)
        if self._transport.get_write_buffer_size():
            self._transport.abort()
        else:
            self._transport.close()

    def close(self) -> None:
        """Close when everything is sent; a client that is still sending may read it first."""
        if self._is_over:
            return
        if self._has_body:
            self._linger()
            return
        self._is_over = True
        self._set_timer(self._limits.send_seconds, self._transport.abort)
        self._transport.close()

    def _linger(self) -> None:
        """End the sending, and lose what still comes for a while: closing at once would take the answer back."""
        self._is_over = True
        self._held.clear()
        self.resume("pipeline")
        self.resume("parser")
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self._set_timer(_LINGER, self._transport.abort)

    @property
    def is_over(self) -> bool:
        """Whether it takes nothing more."""
        return self._is_over

    def _set_timer(self, seconds: float | None, act: Callable[[], None] | None = None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None or act is None else self._loop.call_later(seconds, act)

    # --- how fast it is read ---------------------------------------------------------------------------------------
    def pause(self, who: str) -> None:
        """Read no more until `who` says so."""
        if not self._pauses:
            self._transport.pause_reading()
        self._pauses.add(who)

    def resume(self, who: str) -> None:
        """Read again, unless another request waits."""
        if who in self._pauses:
            self._pauses.remove(who)
            if not self._pauses and not self._transport.is_closing():
                self._transport.resume_reading()


class Wire:
    """The transport as the parser sees it."""

    def __init__(self, connection: Connection, transport: Any) -> None:
        self._connection, self._transport = connection, transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Send bytes, unless the connection is over."""
        if not self._connection.is_over:
            self._transport.write(data)

    def is_closing(self) -> bool:
        """Whether nothing more can be sent."""
        return self._connection.is_over or self._transport.is_closing()

    def close(self) -> None:
        """Close when everything is sent."""
        self._connection.close()

    def pause_reading(self) -> None:
        """Read no more for now."""
        self._connection.pause("parser")

    def resume_reading(self) -> None:
        """Read again."""
        self._connection.resume("parser")
