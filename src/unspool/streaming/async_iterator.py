"""A streamer that is read as an async iterator, while a thread generates."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from unspool.streaming.base import DecodingTokenizer, Failure, StreamCancelled
from unspool.streaming.queued import QueuedTextStreamer


class AsyncTextIteratorStreamer(QueuedTextStreamer):
    """Keeps final text in a queue for a coroutine, which iterates over the streamer with `async for`.

    Make it inside a coroutine: it belongs to the event loop that runs there, and may be put into from any
    thread. A read that waits longer than `timeout` seconds raises `TimeoutError`.
    """

    def __init__(
        self,
        tokenizer: DecodingTokenizer,
        skip_prompt: bool = False,
        timeout: float | None = None,
        **decode_kwargs: Any,
    ) -> None:
        super().__init__(tokenizer, skip_prompt, timeout, **decode_kwargs)
        self.text_queue: asyncio.Queue[str | Failure | None] = asyncio.Queue()
        self.loop = asyncio.get_running_loop()

    def end(self) -> None:
        """Give the reader the rest of the text, and the end."""
        self._cancellation.end()
        with suppress(StreamCancelled):  # no reader is left
            super().end()

    def fail(self, error: BaseException) -> None:
        """End the stream with an error, which the reader's next read past the text so far raises."""
        self._cancellation.end()
        self.reset()
        with suppress(StreamCancelled):
            self._send(Failure(error))

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Queue newly final text, and the stop signal after the last of it, from any thread."""
        self._send(text)
        if stream_end:
            self._send(self.stop_signal)

    def _send(self, item: str | Failure | None) -> None:
        try:
            self.loop.call_soon_threadsafe(self.text_queue.put_nowait, item)
        except RuntimeError as error:
            if not self.loop.is_closed():
                raise
            # Nothing can read any more, which is the same as cancelling.
            raise StreamCancelled("the event loop that read this stream is closed") from error

    def __aiter__(self) -> AsyncTextIteratorStreamer:
        return self

    async def __anext__(self) -> str:
        async with asyncio.timeout(self.timeout):
            value = await self.text_queue.get()
        if isinstance(value, Failure):
            raise value.error
        if value is None or value == self.stop_signal:
            raise StopAsyncIteration
        return value
