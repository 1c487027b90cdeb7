"""What a tokenizer.json may do to a text, read off before the file is handed to the tokenizers library.

The library aborts the process when memory runs out and can't be interrupted, so a file is refused where it could make
much of a little text (replacements that grow, pieces that repeat) or take long over it (patterns that go back and
forth, words without end).
"""

from __future__ import annotations

import base64
import json
import re
import time
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from tokenizers import Regex, pre_tokenizers

from unspool.errors import LoadError, excerpt
from unspool.text.backend import SPLITS

MAX_GROWTH = 16  # times that rules may lengthen a text
MAX_ENTRY_BYTES = 64  # of a table of normal forms
MAX_STEPS = 64  # of a sequence of rules
MAX_RULE_CHARACTERS = 4096  # of a pattern, or of a text that is put in
MAX_PIECES = 64  # of a template around a text
MAX_ADDED_TOKENS = 200_000
MAX_ADDED_CHARACTERS = 4_000_000
MAX_PIECE_BYTES = 256  # of a unigram piece: reading a text takes its length times this
MAX_WORD_CHARACTERS = 128  # that WordPiece tries to divide: it takes the square of them

# An unbounded repetition of a group, or what refers back: such patterns can take time without end.
_REPEATED_GROUP = re.compile(r"\)(?:[*+]|\{\d*,\})")
_REFERENCE = re.compile(r"\\[1-9kg]|\(\?(?:~|\||[R0-9&]|P[=>])")
_LARGE_COUNT = re.compile(r"\{[^}]*\d{4}")
_PROBES = (*"aZé 0.\n\r日\u0301€▁",)
_SECONDS_OF_A_PROBE = 0.04


def check_tokenizer(described: Mapping[str, Any], where: str) -> float:
    """Refuse a tokenizer.json that could work too hard; returns how many times it may lengthen a text."""
    growth = 1.0
    for rule in _list_steps(described.get("normalizer"), "normalizers", where):
        growth *= _find_growth(rule, where)
    if growth > MAX_GROWTH:
        raise LoadError(f"{where}: its normalizers can make a text {growth:.3g} times as long; at most {MAX_GROWTH}")
    for rule in _list_steps(described.get("pre_tokenizer"), "pretokenizers", where):
        _check_pattern(rule.get("pattern"), where)
    grown = 1.0
    for rule in _list_steps(described.get("decoder"), "decoders", where):
        grown *= _find_growth(rule, where)
    if grown > MAX_GROWTH:
        raise LoadError(f"{where}: its decoders can make a text {grown:.3g} times as long; at most {MAX_GROWTH}")
    for rule in _list_steps(described.get("post_processor"), "processors", where):
        _check_template(rule, where)
    _check_added(described.get("added_tokens"), where)
    _check_model(described.get("model"), where)
    return growth


def _list_steps(rule: Any, name: str, where: str) -> list[Mapping[str, Any]]:
    """The rules of a part of a tokenizer, sequences in sequences laid out in a row."""
    found: list[Mapping[str, Any]] = []
    pending = [rule]
    while pending:
        step = pending.pop()
        if not isinstance(step, dict):
            continue
        inner = step.get(name)
        if isinstance(inner, list):
            pending.extend(inner[: MAX_STEPS + 1])
        else:
            found.append(step)
        if len(found) > MAX_STEPS or len(pending) > 2 * MAX_STEPS:
            raise LoadError(f"{where}: it has more than {MAX_STEPS} {name} in a row")
    return found


def _find_growth(rule: Mapping[str, Any], where: str) -> float:
    kind = rule.get("type")
    added = rule.get("content", rule.get("prepend"))
    if isinstance(added, str) and len(added) > MAX_RULE_CHARACTERS:
        raise LoadError(f"{where}: a {excerpt(kind)} puts in {len(added)} characters; at most {MAX_RULE_CHARACTERS}")
    if kind == "Replace":
        _check_pattern(rule.get("pattern"), where)
        pattern = rule.get("pattern")
        literal = pattern.get("String") if isinstance(pattern, dict) else None
        size = len(added.encode("utf-8", "replace")) if isinstance(added, str) else 0
        if isinstance(literal, str) and literal:
            return max(1.0, size / len(literal.encode("utf-8", "replace")))
        # A pattern may match between any two characters.
        return 1.0 + size
    if kind == "Prepend" and isinstance(added, str) and len(added) > MAX_PIECES:
        raise LoadError(f"{where}: a text gets {len(added)} characters put before it; at most {MAX_PIECES}")
    if kind == "Precompiled":
        return _measure_charsmap(rule.get("precompiled_charsmap"), where)
    if kind == "Strip" and any(isinstance(rule.get(key), int) and rule[key] > MAX_PIECES for key in ("start", "stop")):
        raise LoadError(f"{where}: a decoder strips more than {MAX_PIECES} characters")
    return 2.0 if kind == "ByteLevel" else 1.0  # normal forms lengthen only what users themselves write


def _measure_charsmap(encoded: Any, where: str) -> float:
    try:
        return measure_charsmap(base64.b64decode(encoded or "", validate=True))
    except (TypeError, ValueError) as error:
        raise LoadError(f"{where}: its precompiled_charsmap is damaged: {error}") from error


def measure_charsmap(charsmap: bytes) -> float:
    """How many times sentencepiece's table of normal forms may lengthen a text: its longest entry, 18 in real ones."""
    size = int.from_bytes(charsmap[:4], "little")
    longest = max(map(len, charsmap[4 + size :].split(b"\0")), default=0)
    if longest > MAX_ENTRY_BYTES:
        raise LoadError(f"a precompiled_charsmap has an entry of {longest} bytes; at most {MAX_ENTRY_BYTES}")
    return 1.0


def _check_pattern(pattern: Any, where: str) -> None:
    """Refuse a regular expression that takes more time than in proportion to the text."""
    text = pattern.get("Regex", pattern.get("String")) if isinstance(pattern, dict) else pattern
    if not isinstance(text, str):
        return
    if len(text) > MAX_RULE_CHARACTERS:
        raise LoadError(f"{where}: a pattern has {len(text)} characters; at most {MAX_RULE_CHARACTERS}")
    if not isinstance(pattern, dict) or "Regex" not in pattern:
        return
    if text in _list_known_patterns():
        return
    plain = re.sub(r"\\[\\()\[\]{}]", "", text)  # what is escaped means itself
    if _REPEATED_GROUP.search(plain) or _REFERENCE.search(plain) or _LARGE_COUNT.search(plain):
        raise LoadError(
            f"{where}: the pattern {excerpt(text)} repeats a group without end or refers back, "
            "which can take time without end"
        )
    _probe(text, where)


@lru_cache(maxsize=1)
def _list_known_patterns() -> frozenset[str]:
    """The patterns of the families that are known here."""
    steps = [json.loads(step.__getstate__()) for split in SPLITS.values() for step in split.cut(False)]
    patterns = [step["pattern"].get("Regex") for step in steps if "pattern" in step]
    return frozenset([*patterns, " {2,}", r"\s+", r"\p{N}", r"\p{N}{1,3}"])


def _probe(pattern: str, where: str) -> None:
    """Try a pattern on short runs of many characters: one that takes the square of their length shows there."""
    try:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
    except Exception as error:  # the library raises plain Exception for what it can't compile
        raise LoadError(f"{where}: the pattern {excerpt(pattern)} can't be compiled: {error}") from error
    # At the end stands all that the pattern spells: the library gives up at once where a letter it needs is nowhere.
    end = "\x02" + "\x02".join(pattern[:200])
    for character in dict.fromkeys([*_PROBES, *filter(str.isalnum, pattern[:60])]):
        for length in (20, 40, 80, 160, 320, 640, 1280, 2560, 5120):
            run = character * length
            seconds = []
            for _ in range(2):  # the better of two: the machine may be busy
                start = time.thread_time()
                split.pre_tokenize_str(run + end)
                seconds.append(time.thread_time() - start)
                if seconds[-1] < _SECONDS_OF_A_PROBE:
                    break
            if min(seconds) > _SECONDS_OF_A_PROBE:
                raise LoadError(
                    f"{where}: the pattern {excerpt(pattern)} takes {min(seconds):.2f} s for {length} times "
                    f"{excerpt(character)}, so a long text would take time without end"
                )


def _check_template(rule: Mapping[str, Any], where: str) -> None:
    for key in ("single", "pair"):
        pieces = rule.get(key)
        if not isinstance(pieces, list):
            continue
        num_texts = sum(isinstance(piece, dict) and "Sequence" in piece for piece in pieces)
        if len(pieces) > MAX_PIECES or num_texts > 2:
            raise LoadError(f"{where}: its template has {len(pieces)} pieces and repeats the text {num_texts} times")
    special = rule.get("special_tokens")
    for token in special.values() if isinstance(special, dict) else ():
        ids = token.get("ids") if isinstance(token, dict) else None
        if isinstance(ids, list) and len(ids) > MAX_PIECES:
            raise LoadError(f"{where}: its template puts in {len(ids)} tokens at one place; at most {MAX_PIECES}")


def _check_added(tokens: Any, where: str) -> None:
    if not isinstance(tokens, list):
        return
    check_added_tokens([str(token.get("content")) for token in tokens if isinstance(token, dict)], where)


def check_added_tokens(contents: list[str], where: str) -> None:
    """Refuse more added tokens than can be searched for at once."""
    size = sum(map(len, contents))
    if len(contents) > MAX_ADDED_TOKENS or size > MAX_ADDED_CHARACTERS:
        raise LoadError(
            f"{where}: {len(contents)} added tokens of {size} characters; at most {MAX_ADDED_TOKENS} of "
            f"{MAX_ADDED_CHARACTERS}"
        )


def _check_model(model: Any, where: str) -> None:
    if not isinstance(model, dict):
        return
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        mark = model.get(key)
        if isinstance(mark, str) and len(mark) > MAX_PIECES:
            raise LoadError(f"{where}: {key} has {len(mark)} characters; at most {MAX_PIECES}")
    longest = model.get("max_input_chars_per_word")
    if isinstance(longest, int) and longest > MAX_WORD_CHARACTERS:
        raise LoadError(f"{where}: max_input_chars_per_word is {longest}; at most {MAX_WORD_CHARACTERS}")
    if isinstance(model.get("vocab"), list):
        check_pieces(_list_pieces(model["vocab"]), where)


def _list_pieces(vocabulary: list[Any]) -> Iterator[str]:
    for entry in vocabulary:
        if isinstance(entry, list) and entry and isinstance(entry[0], str):
            yield entry[0]


def check_pieces(pieces: Iterator[str], where: str) -> None:
    """Refuse a unigram vocabulary with pieces so long that reading a text takes long."""
    longest = max(pieces, key=len, default="")
    if len(longest.encode("utf-8", "replace")) > MAX_PIECE_BYTES:
        raise LoadError(f"{where}: it has a piece of {len(longest)} characters; at most {MAX_PIECE_BYTES} bytes")
