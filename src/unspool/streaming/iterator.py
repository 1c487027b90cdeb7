"""A streamer that is read as an iterator, while another thread generates."""

from __future__ import annotations

from queue import Queue
from typing import Any

from unspool.streaming.base import DecodingTokenizer, Failure
from unspool.streaming.queued import QueuedTextStreamer


class TextIteratorStreamer(QueuedTextStreamer):
    """Keeps final text in a queue for a reader in another thread, who iterates over the streamer.

    A read that waits longer than `timeout` seconds raises `queue.Empty`.
    """

    def __init__(
        self,
        tokenizer: DecodingTokenizer,
        skip_prompt: bool = False,
        timeout: float | None = None,
        **decode_kwargs: Any,
    ) -> None:
        super().__init__(tokenizer, skip_prompt, timeout, **decode_kwargs)
        self.text_queue: Queue[str | Failure | None] = Queue()

    def end(self) -> None:
        """Give the reader the rest of the text, and the end."""
        self._cancellation.end()
        super().end()

    def fail(self, error: BaseException) -> None:
        """End the stream with an error, which the reader's next read past the text so far raises."""
        self._cancellation.end()
        self.reset()
        self.text_queue.put(Failure(error))

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Queue newly final text, and the stop signal after the last of it."""
        self.text_queue.put(text)
        if stream_end:
            self.text_queue.put(self.stop_signal)

    def __iter__(self) -> TextIteratorStreamer:
        return self

    def __next__(self) -> str:
        value = self.text_queue.get(timeout=self.timeout)
        if isinstance(value, Failure):
            raise value.error
        if value is None or value == self.stop_signal:
            raise StopIteration
        return value
