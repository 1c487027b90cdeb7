"""Server-sent events: a response that pings, notices a closed connection and drops a reader that hangs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any, Final

from starlette.responses import Response

PING: Final = b": ping\n\n"


class EventStream(Response):
    """A stream of events; `close` is called when either side ends it."""

    def __init__(
        self,
        events: AsyncIterator[bytes],
        close: Callable[[], None],
        *,
        media_type: str = "text/event-stream",
        ping: bytes | None = PING,
        ping_seconds: float = 15.0,
        send_seconds: float = 60.0,
    ) -> None:
        super().__init__(media_type=media_type, headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events, self._close = events, close
        self._ping, self._ping_seconds, self._send_seconds = ping, ping_seconds, send_seconds
        self._sent_at = time.monotonic()
        self._sending_since: float | None = None

    async def __call__(self, _scope: Any, receive: Any, send: Any) -> None:
        """Send the events until they end, the client goes, or it stops reading."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        sending = asyncio.create_task(self._send_all(send))
        watching = asyncio.create_task(wait_until_gone(receive))
        keeping = asyncio.create_task(self._keep(send))
        tasks = (sending, watching, keeping)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._close()
            for task in tasks:
                task.cancel()
            with suppress(asyncio.CancelledError):  # the server ends, and waits for no stream
                await asyncio.gather(*tasks, return_exceptions=True)
                if isinstance(self._events, AsyncGenerator):
                    await self._events.aclose()
        error = sending.exception() if sending.done() and not sending.cancelled() else None
        if error is not None and not isinstance(error, OSError):  # an OSError: the client has gone
            raise error

    async def _send_all(self, send: Callable[[Any], Awaitable[None]]) -> None:
        async for event in self._events:
            await self._send(send, event)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Callable[[Any], Awaitable[None]], event: bytes) -> None:
        self._sending_since = time.monotonic()
        await send({"type": "http.response.body", "body": event, "more_body": True})
        self._sending_since, self._sent_at = None, time.monotonic()

    async def _keep(self, send: Callable[[Any], Awaitable[None]]) -> None:
        """Ping in silence; returns when the client has not read for too long."""
        tick = max(0.05, min(self._ping_seconds, self._send_seconds, 5.0) / 2)
        while True:
            await asyncio.sleep(tick)
            now = time.monotonic()
            if self._sending_since is not None:
                if now - self._sending_since > self._send_seconds:
                    return
            elif self._ping is not None and now - self._sent_at >= self._ping_seconds:
                with suppress(OSError):
                    await self._send(send, self._ping)


async def wait_until_gone(receive: Any) -> None:
    """Return when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
