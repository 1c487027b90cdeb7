"""What a token reads as in the middle of a text, for byte-level and for sentencepiece vocabularies."""

from __future__ import annotations

import re
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal
from weakref import WeakKeyDictionary

Mode = Literal["byte_level", "byte_fallback"] | None
Piece = bytes | str

STATIC_PREFIX = "abcdef"
_ENDS_KEPT = 64  # sets of texts
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[int, int]:
    """GPT-2's alphabet, backwards: the character that stands for a byte -> the byte."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {byte: byte for byte in shown} | {256 + place: byte for place, byte in enumerate(hidden)}


BYTE_OF_CHARACTER = _byte_alphabet()


@dataclass(frozen=True)
class Reading:
    """How a tokenizer's tokens are read, and what is known of them already."""

    mode: Mode
    prefix: str
    before: tuple[str, ...]  # the prefix's tokens: decoders treat the first token of a text differently
    known: dict[int, Piece] = field(default_factory=dict)
    # Which tokens the ends of some texts can lie in, as far as it was asked: calls with equal stop strings ask again.
    ends: OrderedDict[tuple[Piece, ...], dict[int, bool]] = field(default_factory=OrderedDict)

    @classmethod
    def of(cls, tokenizer: Any, prefix: str = STATIC_PREFIX, mode: Mode | Literal["ask"] = "ask") -> Reading:
        """Find out by trying a few tokens."""
        return cls(find_mode(tokenizer) if mode == "ask" else mode, prefix, _tokenize(tokenizer, prefix))


# Readings hold no tokenizer, or they would keep alive what they are weakly kept by.
_READINGS: WeakKeyDictionary[Any, Reading] = WeakKeyDictionary()


def _share_reading(tokenizer: Any) -> Reading:
    try:
        reading = _READINGS.get(tokenizer)
        if reading is None:
            reading = _READINGS[tokenizer] = Reading.of(tokenizer)
    except TypeError:  # can't be hashed or weakly held
        return Reading.of(tokenizer)
    return reading


class TokenPieces:
    """The pieces of a tokenizer's tokens, worked out one by one when asked for, and kept while it lives.

    Bytes where the vocabulary has tokens for parts of characters, so that half a character is still a piece;
    strings otherwise.
    """

    def __init__(self, tokenizer: Any, reading: Reading | None = None) -> None:
        self._tokenizer = tokenizer
        self._reading = _share_reading(tokenizer) if reading is None else reading
        self.mode: Mode = self._reading.mode

    def find_ends(self, texts: tuple[Piece, ...]) -> dict[int, bool]:
        """Which tokens these texts can end in, as far as it is known: whoever finds out more enters it."""
        ends = self._reading.ends
        found = ends.setdefault(texts, {})
        if len(ends) > _ENDS_KEPT:
            with suppress(KeyError):  # another thread may have been here
                ends.popitem(last=False)
        return found

    def encode(self, text: str) -> Piece:
        """A text in the form the pieces have."""
        return text if self.mode is None else text.encode("utf-8", "surrogatepass")

    def piece(self, token_id: int) -> Piece | None:
        """What a token reads as; None for an id that is no token."""
        known = self._reading.known.get(token_id)
        if known is not None:
            return known
        token = self._find_token(token_id)
        if token is None:  # not kept: the vocabulary may grow
            return None
        self._reading.known[token_id] = found = self.read(token)
        return found

    def _find_token(self, token_id: int) -> str | None:
        if token_id < 0:
            return None
        try:
            tokens = self._tokenizer.convert_ids_to_tokens([token_id])
        except (KeyError, IndexError, ValueError, OverflowError):
            return None
        token = tokens[0] if tokens else None
        return token if isinstance(token, str) else None

    def read(self, token: str) -> Piece:
        """What a token of the vocabulary reads as."""
        if self.mode == "byte_level":
            characters = [BYTE_OF_CHARACTER.get(ord(character), -1) for character in token]
            if -1 not in characters:
                return bytes(characters)
        elif self.mode == "byte_fallback" and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        prefix = self._reading.prefix
        text: str = self._tokenizer.convert_tokens_to_string([*self._reading.before, token])
        start = text.find(prefix)
        return self.encode(text[start + len(prefix) :] if start >= 0 else token)


def find_mode(tokenizer: Any) -> Mode:
    """Whether a tokenizer's vocabulary is of bytes, falls back to bytes, or knows no bytes, by what it decodes."""
    join = tokenizer.convert_tokens_to_string
    if _decodes(join, "<0x41>", "A"):
        return "byte_fallback"
    return "byte_level" if _decodes(join, "Ġ", " ") else None


def _decodes(join: Any, token: str, text: str) -> bool:
    try:
        return str(join(["a", token, "a"])) == f"a{text}a"
    except (KeyError, ValueError, TypeError):  # a tokenizer that only joins tokens it has
        return False


def _tokenize(tokenizer: Any, text: str) -> tuple[str, ...]:
    if callable(tokenizer):
        try:
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            tokens = tuple(tokenizer.convert_ids_to_tokens(ids))
            if text in tokenizer.convert_tokens_to_string([*tokens]):
                return tokens
        except (KeyError, TypeError):  # callable in another way
            pass
    return (text,)
