"""A text and its tokens, each with the characters that it stands for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from unspool.errors import InputError
from unspool.text import Tokenizer


@dataclass(frozen=True, slots=True)
class TokenSpans:
    """The ids of a text, and where each begins and ends in it."""

    text: str
    ids: list[int]
    spans: list[tuple[int, int]]

    def __len__(self) -> int:
        return len(self.ids)


def find_spans(tokenizer: Tokenizer, text: str) -> TokenSpans:
    """The tokens of a text without special ones. Characters between two tokens belong to the second."""
    found = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
    spans, last = [], 0
    for begin, end in found.offsets:
        begin, end = (last, max(end, last)) if begin >= last else (begin, max(end, last))
        spans.append((begin, end))
        last = end
    if spans and last < len(text):
        spans[-1] = (spans[-1][0], len(text))
    if not spans:
        raise InputError(f"the text {text[:40]!r} has no tokens; leave it out")
    return TokenSpans(text, list(found.ids), spans)


def cut_text(tokens: TokenSpans, kept: Sequence[bool]) -> str:
    """What kept tokens stand for. A character of several tokens stays with any of them."""
    parts, last = [], 0
    for (begin, end), stays in zip(tokens.spans, kept, strict=True):
        if stays and end > last:
            parts.append(tokens.text[max(begin, last) : end])
            last = end
    return "".join(parts)
