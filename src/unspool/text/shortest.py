"""How few tokens a text can have, known without encoding it: one token stands for so many bytes at most."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import tokenizers

from unspool.text.token_texts import list_byte_letters
from unspool.text.work import list_rules

_COMPOSED: Final = 4  # times that normal forms and small letters may shorten a text: a mathematical A becomes an A
_NORMAL: Final = frozenset(["NFC", "NFD", "NFKC", "NFKD", "Lowercase"])
_KEEPING: Final = frozenset(["ByteLevel", "Digits", "Metaspace", "UnicodeScripts"])
_CUTTING: Final = frozenset(["Split", "Punctuation"])  # which keep everything unless they are said to remove


@dataclass(frozen=True)
class TokenBound:
    """The most bytes of a text that end in one token, and the bytes that end in none."""

    most_bytes: int
    lost: bytes = b""  # for which a vocabulary of bytes has no tokens

    def count(self, text: str) -> int:
        """The fewest tokens that a text can have."""
        size = len(text.encode("utf-8", "replace").translate(None, self.lost))
        return -(-size // self.most_bytes)


def find_bound(backend: tokenizers.Tokenizer) -> TokenBound | None:
    """How few tokens a text can have; None where a token may stand for any number of bytes.

    That is so where rules take characters away, or where one token stands for all that is unknown in a row.
    """
    rules = [*list_rules(backend.normalizer), *list_rules(backend.pre_tokenizer)]
    if backend.truncation is not None or not isinstance(backend.model, tokenizers.models.BPE):
        return None
    factor = 1
    for rule in rules:
        if rule.get("type") in _NORMAL:
            factor *= _COMPOSED
        elif not _keeps_all(rule):
            return None
    added = backend.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added):  # such a token takes the white space around it
        return None
    vocabulary = backend.get_vocab(with_added_tokens=False)
    is_byte_level, lost = any(rule.get("type") == "ByteLevel" for rule in rules), b""
    if is_byte_level and backend.model.unk_token is None:
        lost = bytes(byte for letter, byte in list_byte_letters().items() if letter not in vocabulary)
        if lost and factor > 1:  # what is lost is not what was there
            return None
    elif not _has_every_character(backend.model, vocabulary):
        return None
    longest = max((len(token) if is_byte_level else _count(token) for token in vocabulary), default=0)
    return TokenBound(factor * max([longest, *(_count(token.content) for token in added), 1]), lost)


def _keeps_all(rule: dict[str, Any]) -> bool:
    """Whether what a rule makes of a text has all of the text's bytes."""
    kind, pattern = rule.get("type"), rule.get("pattern")
    if kind in _KEEPING or kind == "Prepend":
        return True
    if kind in _CUTTING:
        return str(rule.get("behavior")).lower() != "removed"
    literal, content = pattern.get("String") if isinstance(pattern, dict) else pattern, rule.get("content")
    if kind != "Replace" or not isinstance(literal, str) or not isinstance(content, str):
        return False
    return _count(content) >= _count(literal)


def _has_every_character(model: Any, vocabulary: dict[str, int]) -> bool:
    """Whether a character without a token has tokens for its bytes, or an unknown token of its own."""
    if model.byte_fallback:
        return all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    return model.unk_token in vocabulary and not model.fuse_unk


def _count(text: str) -> int:
    return len(text.encode("utf-8", "replace"))
