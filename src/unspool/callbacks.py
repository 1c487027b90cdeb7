"""Functions and streamers of a caller's own: are they such?"""

from __future__ import annotations

from typing import Any

from unspool.errors import SettingError


def check_callback(name: str, function: Any, arguments: str) -> None:
    """Raise for something that is neither None nor can be called."""
    if function is not None and not callable(function):
        raise SettingError(
            f"`{name}`={function!r:.40} can't be called; give a function {name}({arguments}), or leave it out"
        )


def check_streamer(streamer: Any) -> None:
    """Raise for something that is neither None nor takes tokens as they come."""
    if streamer is not None and not all(callable(getattr(streamer, name, None)) for name in ("put", "end")):
        raise SettingError(
            f"`streamer`={streamer!r:.40} has no put(tokens) and end(); give a TextStreamer, or an object with both"
        )


def check_tokenizer(tokenizer: Any) -> None:
    """Raise for something that is neither None nor turns tokens into text."""
    known = ("get_vocab", "convert_tokens_to_string", "batch_decode")  # one of these: other parts ask for more
    is_one = not isinstance(tokenizer, type) and any(callable(getattr(tokenizer, name, None)) for name in known)
    if tokenizer is not None and not is_one:
        raise SettingError(
            f"`tokenizer`={tokenizer!r:.40} is no tokenizer; give lm.tokenizer or one of transformers', or leave it out"
        )
