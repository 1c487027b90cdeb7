"""What a tokenizer.json may hold, checked before the file is handed to the tokenizers library.

The library aborts the process when memory runs out and can't be interrupted, so a file is refused if it could make
much of a little text (replacements that grow, pieces that repeat) in a way that no tokenizer in use does. What
encoding with an accepted file may cost, by its regular expressions above all, is the matter of `work`.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from unspool.errors import LoadError, excerpt
from unspool.text.patterns import find_cost
from unspool.text.work import find_growth, measure_charsmap, multiply_growths

MAX_GROWTH = 16  # times that rules may lengthen a text
MAX_ENTRY_BYTES = 64  # of a table of normal forms
MAX_STEPS = 64  # of a sequence of rules
MAX_RULE_CHARACTERS = 4096  # of a pattern, or of a text that is put in
MAX_PIECES = 64  # of a template around a text
MAX_ID = (1 << 24) - 1  # of a token: the library writes a vocabulary by counting up to its largest id
MAX_ADDED_TOKENS = 200_000
MAX_ADDED_CHARACTERS = 4_000_000
MAX_PIECE_BYTES = 256  # of a unigram piece: reading a text takes its length times this
MAX_WORD_CHARACTERS = 128  # that WordPiece tries to divide: it takes the square of them

_LARGE_COUNT = re.compile(r"\{[^{}]*\d{4}")  # such a pattern takes long to compile
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def is_unicode(token: str) -> bool:
    """Whether a token from a JSON file, which may spell lone surrogates, can stand in a UTF-8 text."""
    return _LONE_SURROGATE.search(token) is None


def check_vocabulary(ids: Mapping[str, Any], where: Path, largest: int = MAX_ID) -> None:
    """Refuse a vocab.json that does not map valid tokens to ids from 0 to `largest`."""
    if not ids or not all(type(index) is int and 0 <= index <= largest for index in ids.values()):
        raise LoadError(f"{where} must map every token to an id of 0 or more, at most {largest}")
    if not all(map(is_unicode, ids)):
        raise LoadError(f"{where} has a token that is not valid Unicode")


def check_tokenizer(described: Mapping[str, Any], where: str) -> None:
    """Refuse a tokenizer.json that could work too hard."""
    for part in ("normalizer", "decoder"):
        rules = _list_steps(described.get(part), f"{part}s", where)
        for rule in rules:
            _check_rule(rule, where)
            if part == "decoder":
                _check_decoder(rule, where)
        growth = multiply_growths(rules, _find_growth)
        if growth > MAX_GROWTH:
            raise LoadError(f"{where}: its {part}s can make a text {growth:.3g} times as long; at most {MAX_GROWTH}")
    for rule in _list_steps(described.get("pre_tokenizer"), "pretokenizers", where):
        _check_pattern(rule.get("pattern"), where)
    for rule in _list_steps(described.get("post_processor"), "processors", where):
        _check_template(rule, where)
    _check_added(described.get("added_tokens"), where)
    _check_model(described.get("model"), where)


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


def _check_rule(rule: Mapping[str, Any], where: str) -> None:
    """Refuse a normalizer or decoder out of bounds."""
    kind = rule.get("type")
    added = rule.get("content", rule.get("prepend"))
    if isinstance(added, str) and len(added) > MAX_RULE_CHARACTERS:
        raise LoadError(f"{where}: a {excerpt(kind)} puts in {len(added)} characters; at most {MAX_RULE_CHARACTERS}")
    if kind == "Prepend" and isinstance(added, str) and len(added) > MAX_PIECES:
        raise LoadError(f"{where}: a text gets {len(added)} characters put before it; at most {MAX_PIECES}")
    if kind == "Precompiled":
        check_charsmap(_decode_charsmap(rule.get("precompiled_charsmap"), where), where)
    _check_pattern(rule.get("pattern"), where)


def _find_growth(rule: Mapping[str, Any]) -> float:
    """How many times a replacement may lengthen a text; normal forms lengthen only what users themselves write."""
    return find_growth(rule) if rule.get("type") == "Replace" else 1.0


def _check_decoder(rule: Mapping[str, Any], where: str) -> None:
    if any(isinstance(rule.get(key), int) and rule[key] > MAX_PIECES for key in ("start", "stop")):
        raise LoadError(f"{where}: a decoder strips more than {MAX_PIECES} characters")
    pattern = rule.get("pattern")
    text = pattern.get("Regex") if isinstance(pattern, dict) else None
    # Decoding happens token by token, too often for a process of its own.
    if isinstance(text, str) and find_cost(text).degree != 1:
        raise LoadError(f"{where}: a decoder has the pattern {excerpt(text)}, whose work can't be bounded")


def _decode_charsmap(encoded: Any, where: str) -> bytes:
    try:
        return base64.b64decode(encoded or "", validate=True)
    except (TypeError, ValueError) as error:
        raise LoadError(f"{where}: its precompiled_charsmap is damaged: {error}") from error


def check_charsmap(charsmap: bytes, where: str) -> None:
    """Refuse a table of normal forms with an entry that makes much of a character."""
    longest = measure_charsmap(charsmap)
    if longest > MAX_ENTRY_BYTES:
        raise LoadError(f"{where}: precompiled_charsmap has an entry of {longest} bytes; at most {MAX_ENTRY_BYTES}")


def _check_pattern(pattern: Any, where: str) -> None:
    """Refuse a pattern that takes long to compile."""
    pattern = pattern if isinstance(pattern, dict) else {"String": pattern}
    for text in (pattern.get("Regex"), pattern.get("String")):
        if isinstance(text, str) and len(text) > MAX_RULE_CHARACTERS:
            raise LoadError(f"{where}: a pattern has {len(text)} characters; at most {MAX_RULE_CHARACTERS}")
    regex = pattern.get("Regex")
    if isinstance(regex, str) and _LARGE_COUNT.search(regex):
        raise LoadError(f"{where}: the pattern {excerpt(regex)} counts to 1000 or more")


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
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        far = next((index for index in vocabulary.values() if isinstance(index, int) and index > MAX_ID), None)
        if far is not None:
            raise LoadError(f"{where}: a token has the id {excerpt(far)}; at most {MAX_ID}")
    if isinstance(vocabulary, list):
        check_pieces(_list_pieces(vocabulary), where)


def _list_pieces(vocabulary: list[Any]) -> Iterator[str]:
    for entry in vocabulary:
        if isinstance(entry, list) and entry and isinstance(entry[0], str):
            yield entry[0]


def check_pieces(pieces: Iterator[str], where: str) -> None:
    """Refuse a unigram vocabulary with pieces so long that reading a text takes long."""
    longest = max(pieces, key=len, default="")
    if len(longest.encode("utf-8", "replace")) > MAX_PIECE_BYTES:
        raise LoadError(f"{where}: it has a piece of {len(longest)} characters; at most {MAX_PIECE_BYTES} bytes")
