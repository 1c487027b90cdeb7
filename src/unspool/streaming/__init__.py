"""Streamers: objects that a generation puts tokens into, and that give text out as it becomes final."""

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
