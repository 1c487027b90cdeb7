"""Streamers: objects that receive a generation's tokens, and output text as it becomes final."""

from unspool.streaming.async_iterator import AsyncTextIteratorStreamer
from unspool.streaming.base import BaseStreamer, DecodingTokenizer, StreamCancelled
from unspool.streaming.iterator import TextIteratorStreamer
from unspool.streaming.text import TextStreamer

__all__ = [
    "AsyncTextIteratorStreamer",
    "BaseStreamer",
    "DecodingTokenizer",
    "StreamCancelled",
    "TextIteratorStreamer",
    "TextStreamer",
]
