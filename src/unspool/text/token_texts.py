"""The text and the bytes of single tokens."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, Final

_BYTE: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@lru_cache(maxsize=1)
def list_byte_letters() -> dict[str, int]:
    """The byte that each letter of a byte-level vocabulary stands for."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + place): byte for place, byte in enumerate(rest)}


class TokenTexts:
    """The texts and bytes of a vocabulary's tokens, each found once."""

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer` is a Tokenizer, or None for a model without one."""
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, bytes]] = {}

    def find(self, token: int) -> tuple[str, bytes]:
        """A token's text, and its bytes, which need not be whole characters."""
        known = self._known.get(token)
        if known is None:
            known = self._known[token] = self._make(token)
        return known

    def show(self, token: int) -> str:
        """A token's text, with bytes that are no whole character as `<0xE2>`."""
        text, spelled = self.find(token)
        if "\ufffd" not in text or b"\xef\xbf\xbd" in spelled:  # U+FFFD may be meant
            return text
        return _show_bytes(spelled)

    def _make(self, token: int) -> tuple[str, bytes]:
        if self._tokenizer is None:
            return f"token_id:{token}", b""
        text = self._tokenizer.decode([token])
        spelled = self._tokenizer.convert_ids_to_tokens(token) or ""
        if spelled.startswith("\u2581") and not text.startswith(" "):
            text = f" {text}"
        if "\ufffd" not in text:
            return text, text.encode()
        byte = _BYTE.fullmatch(spelled)
        if byte is not None:
            return text, bytes([int(byte[1], 16)])
        letters = list_byte_letters()
        if spelled and all(letter in letters for letter in spelled):
            return text, bytes(letters[letter] for letter in spelled)
        return text, text.encode()


def _show_bytes(spelled: bytes) -> str:
    """Bytes as text, those that are no whole character one by one as `<0xE2>`."""
    parts: list[str] = []
    while spelled:
        try:
            parts.append(spelled.decode())
            break
        except UnicodeDecodeError as error:
            parts.append(spelled[: error.start].decode())
            parts += [f"<0x{byte:02X}>" for byte in spelled[error.start : error.end]]
            spelled = spelled[error.end :]
    return "".join(parts)
