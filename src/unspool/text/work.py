"""How much work a tokenizer may have with a text, and where it is encoded: here, or in a process that can be ended.

The tokenizers library can't be interrupted and aborts the process when memory runs out. So a text is encoded here only
if the worst that the tokenizer's rules can do with its length is small; that holds for the tokenizers in use and texts
of megabytes, and is worked out without looking at the text. Everything else, such as rules that are not understood,
goes to a process of its own (`confined`), whose time and memory have limits.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tokenizers

from unspool.text.confined import encode_confined
from unspool.text.patterns import find_cost

MAX_STEPS_HERE = 2_000_000_000  # of a few nanoseconds each
MAX_BYTES_HERE = 4 << 20  # that rules may make of a text, where they may make more than four times as much of it
MAX_TRIES_HERE = 128  # at each place of a text; the patterns in use have some twenty
_USUAL_GROWTH = 4.0
_STEPS_OF_A_PIECE_BYTE = 20  # looking up a unigram piece, for each byte of the longest one
_BYTES_PUT_BEFORE = 64  # at most, to every text
_ASCII = bytes(range(128))

# The most bytes that a rule makes of one. Normal forms: U+FDFA becomes 18 letters.
_GROWTH = {
    "NFC": 3.0,
    "NFD": 3.0,
    "NFKC": 11.0,
    "NFKD": 11.0,
    "Lowercase": 1.5,
    "BertNormalizer": 5.0,
    "ByteLevel": 2.0,
}


@dataclass(frozen=True)
class Workload:
    """The worst that a tokenizer may do to a text: bytes made of one, steps at each, the power they grow with."""

    growth: float = 1.0
    growth_of_ascii: float = 1.0
    tries: int = 1
    degree: int | None = 1

    def fits_here(self, texts: Sequence[str]) -> bool:
        """Whether encoding these texts is no danger to this process."""
        sizes = [(len(data), len(data.translate(None, _ASCII))) for data in (text.encode() for text in texts)]
        if self.degree is None:
            return False
        grown = [
            (size - other + _BYTES_PUT_BEFORE) * self.growth_of_ascii + other * self.growth for size, other in sizes
        ]
        if sum(grown) > max(MAX_BYTES_HERE, _USUAL_GROWTH * sum(size + _BYTES_PUT_BEFORE for size, _ in sizes)):
            return False
        if self.degree == 1 and self.tries <= MAX_TRIES_HERE:
            return True
        return self.tries * sum(size**self.degree for size in grown) <= MAX_STEPS_HERE


def measure_workload(backend: tokenizers.Tokenizer) -> Workload:
    """The workload of a tokenizer's normalizers, pre-tokenizers and model."""
    tries, degrees = 0, [1]
    rules = [*list_rules(backend.normalizer), *list_rules(backend.pre_tokenizer)]
    growth, growth_of_ascii = (multiply_growths(rules, find) for find in (find_growth, _find_growth_of_ascii))
    for rule in rules:
        pattern = rule.get("pattern")
        if isinstance(pattern, dict) and isinstance(pattern.get("Regex"), str):
            work = find_cost(pattern["Regex"])
            tries += work.tries
            if work.degree is None:
                return Workload(growth, growth_of_ascii, tries, None)
            degrees.append(work.degree)
    if isinstance(backend.model, tokenizers.models.Unigram):
        longest = max((len(piece.encode("utf-8", "replace")) for piece in backend.get_vocab(False)), default=0)
        tries += longest * _STEPS_OF_A_PIECE_BYTE
    return Workload(growth, growth_of_ascii, max(1, tries), max(degrees))


def multiply_growths(rules: Sequence[Mapping[str, Any]], find: Callable[[Mapping[str, Any]], float]) -> float:
    """The most bytes that rules in a row make of one, if each makes what `find` says.

    Rules that put one character for one other leave the number of characters, so together they make no more bytes than
    the one among them whose character is longest.
    """
    total = run = 1.0
    for rule in rules:
        size = _measure_exchange(rule)
        if size:
            run = max(run, size)
        else:
            total, run = total * run * find(rule), 1.0
    return total * run


def _measure_exchange(rule: Mapping[str, Any]) -> int:
    """The bytes of the character that a rule puts for another one; 0 if it does something else."""
    pattern, content = rule.get("pattern"), rule.get("content")
    old = pattern.get("String") if isinstance(pattern, dict) and "Regex" not in pattern else pattern
    if rule.get("type") != "Replace" or not isinstance(old, str) or not isinstance(content, str):
        return 0
    return len(content.encode("utf-8", "replace")) if len(old) == len(content) == 1 else 0


def find_growth(rule: Mapping[str, Any]) -> float:
    """The most bytes that a normalizer, pre-tokenizer or decoder makes of one."""
    kind = rule.get("type")
    if kind == "Replace":
        return _find_growth_of_replacing(rule.get("pattern"), rule.get("content"))
    if kind == "Precompiled":
        return max(1.0, measure_charsmap(base64.b64decode(rule.get("precompiled_charsmap") or "")))
    return _GROWTH.get(str(kind), 1.0)


def _find_growth_of_ascii(rule: Mapping[str, Any]) -> float:
    """The most bytes that a rule makes of one ASCII character."""
    if rule.get("type") == "Precompiled":
        # The table is looked up by what is one character to a reader, so these are all.
        table = tokenizers.normalizers.Precompiled(base64.b64decode(rule.get("precompiled_charsmap") or ""))
        signs = [*map(chr, _ASCII), "\r\n"]
        return max(1.0, *(len(table.normalize_str(sign).encode()) / len(sign) for sign in signs))
    return find_growth(rule) if rule.get("type") in ("Replace", "ByteLevel") else 1.0


def _find_growth_of_replacing(pattern: Any, content: Any) -> float:
    size = len(content.encode("utf-8", "replace")) if isinstance(content, str) else 0
    pattern = pattern if isinstance(pattern, dict) else {"String": pattern}
    literal, regex = pattern.get("String"), pattern.get("Regex")
    if isinstance(regex, str):
        shortest = find_cost(regex).shortest
    else:
        shortest = len(literal.encode("utf-8", "replace")) if isinstance(literal, str) else 0
    # One that matches nothing may do so between any two characters.
    return max(1.0, size / shortest) if shortest else 1.0 + size


def measure_charsmap(charsmap: bytes) -> int:
    """The bytes of the longest entry in sentencepiece's table of normal forms; 33 in those in use."""
    size = int.from_bytes(charsmap[:4], "little")
    return max(map(len, charsmap[4 + size :].split(b"\0")), default=0)


def encode_within_limits(
    backend: tokenizers.Tokenizer, workload: Workload, texts: list[str], add_special_tokens: bool
) -> list[list[int]]:
    """The ids of texts, made here or in a process of its own."""
    if workload.fits_here(texts):
        return [encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)]
    return encode_confined(backend, texts, add_special_tokens)


def list_rules(part: Any) -> list[dict[str, Any]]:
    """The rules of a part of a tokenizer, sequences in sequences laid out in a row."""
    if part is None:
        return []
    try:
        pending = [json.loads(part.__getstate__())]
    except Exception:  # made of Python's objects by the caller, whose own they are
        return []
    found: list[dict[str, Any]] = []
    while pending:
        rule = pending.pop()
        inner = rule.get("normalizers", rule.get("pretokenizers"))
        if isinstance(inner, list):
            pending.extend(inner)
        else:
            found.append(rule)
    return found
