"""Counts of tokens as another model's users pay for them, and where sentences end, without anything downloaded."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Protocol

from unspool.errors import SettingError

_TOKEN = re.compile(r"\w{1,4}|[^\w\s]|\n")
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")

SplitSentences = Callable[[str], list[str]]
"""A text's sentences, each as it stands in the text; white space between them belongs to none."""


class TokenCounter(Protocol):
    """What counts tokens: tiktoken's encodings do."""

    def encode(self, text: str) -> Any: ...


class EstimatedTokens:
    """About the tokens of a GPT: words in pieces of four letters, marks and line ends."""

    def encode(self, text: str) -> list[str]:
        """The pieces of a text."""
        return _TOKEN.findall(text)


def cut_sentences(text: str) -> list[str]:
    """Sentences end with a full stop, a question mark or an exclamation mark that white space follows."""
    return [part for part in _SENTENCE_END.split(text.rstrip()) if part]


def check_counter(counter: Any) -> TokenCounter:
    """Raise for an object that can't count."""
    if counter is None:
        return EstimatedTokens()
    if not callable(getattr(counter, "encode", None)):
        raise SettingError(
            f"`oai_tokenizer` counts tokens by its encode(text), and a {type(counter).__name__} has none; give "
            "tiktoken's encoding, or leave it out for an estimate"
        )
    known: TokenCounter = counter
    return known


def describe_saving(origin: int, compressed: int) -> dict[str, Any]:
    """The counts of a result, in the package's words."""
    ratio = 1 if compressed == 0 else origin / compressed
    rate = 1 / ratio if ratio else 0.0
    return {
        "origin_tokens": origin,
        "compressed_tokens": compressed,
        "ratio": f"{ratio:.1f}x",
        "rate": f"{rate * 100:.1f}%",
        "saving": f", Saving ${(origin - compressed) * 0.06 / 1000:.1f} in GPT-4.",
    }
