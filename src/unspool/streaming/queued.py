"""What streamers share whose text is read elsewhere, from a queue."""

from __future__ import annotations

from typing import Any

import torch

from unspool.streaming.base import Cancellation, DecodingTokenizer, check_timeout
from unspool.streaming.text import TextStreamer


class QueuedTextStreamer(TextStreamer):
    """A streamer whose reader may end it, and waits at most `timeout` seconds for the next text."""

    def __init__(
        self, tokenizer: DecodingTokenizer, skip_prompt: bool, timeout: float | None, **decode_kwargs: Any
    ) -> None:
        super().__init__(tokenizer, skip_prompt, **decode_kwargs)
        self.stop_signal: str | None = None
        self.timeout = check_timeout(timeout)
        self._cancellation = Cancellation()

    def put(self, value: torch.Tensor) -> None:
        """Receive tokens; raises StreamCancelled once the reader has called `cancel`."""
        self._cancellation.check()
        super().put(value)

    def cancel(self) -> None:
        """Called by the reader: no more text is wanted, and the producer's next `put` stops it."""
        self._cancellation.cancel()
