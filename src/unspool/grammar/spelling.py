"""A tokenizer's JSON in the form that the grammar library reads: byte-level, or pieces with ▁ for spaces."""

from __future__ import annotations

import json
import re
from typing import Any, Final

from unspool.errors import UnsupportedError

_BYTE: Final = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_FUSING: Final = ("Metaspace", "Fuse")  # decoders that put pieces together as they are, but for what a space is


def spell_out(text: str) -> str:
    """The tokenizer of a JSON text, as JSON whose pieces the library knows the bytes of.

    The library reads texts from the middle: a tokenizer must not put a space before what it is given.
    """
    held = json.loads(text)
    decoder, before = held["decoder"] or {"type": "none"}, held["pre_tokenizer"]
    kinds = [decoder["type"], *(one["type"] for one in decoder.get("decoders", ()))]
    if "ByteLevel" in kinds or "ByteFallback" in kinds:
        held["pre_tokenizer"] = _keep_beginning(before)
        return json.dumps(held, ensure_ascii=False)
    if kinds[0] not in _FUSING:
        raise UnsupportedError(
            "structured output needs the bytes of every token, which byte-level and sentencepiece tokenizers have; "
            f"this one puts texts together by other rules ({kinds[0]})"
        )
    steps: list[dict[str, Any]] = [{"type": "ByteFallback"}, {"type": "Fuse"}]
    if kinds[0] == "Metaspace":
        space = decoder["replacement"]
        steps.insert(0, {"type": "Replace", "pattern": {"String": space}, "content": " "})
        held["pre_tokenizer"] = {"type": "Metaspace", "replacement": space, "prepend_scheme": "never", "split": True}
    held["decoder"] = {"type": "Sequence", "decoders": steps}
    held["normalizer"] = None  # what is to be written has its characters already
    model = held["model"]
    if model["type"] == "WordLevel" and before is None:  # of pieces that somebody else finds, as Marian's
        model = held["model"] = _make_unigram(model)
    pieces = (
        model["vocab"]
        if isinstance(model["vocab"], dict)
        else {one: place for place, (one, _) in enumerate(model["vocab"])}
    )
    known = {one["id"] for one in held["added_tokens"]}
    # These decoders write <0x41> out, so that no grammar's text has it as a byte.
    written_out = [(piece, place) for piece, place in pieces.items() if _BYTE.fullmatch(piece) and place not in known]
    held["added_tokens"] += [_make_special(piece, place) for piece, place in written_out]
    return json.dumps(held, ensure_ascii=False)


def _keep_beginning(before: Any) -> Any:
    """A step before the tokens, without the space that it puts before a text."""
    if not before:
        return before
    if before["type"] == "Sequence":
        return {**before, "pretokenizers": [_keep_beginning(one) for one in before["pretokenizers"]]}
    if before["type"] == "Metaspace":
        return {**before, "prepend_scheme": "never"}
    return {**before, "add_prefix_space": False} if before["type"] == "ByteLevel" else before


def _make_unigram(words: dict[str, Any]) -> dict[str, Any]:
    """A model of the same pieces that finds the fewest in a text."""
    pieces = sorted(words["vocab"].items(), key=lambda pair: pair[1])
    if [place for _, place in pieces] != list(range(len(pieces))):
        raise UnsupportedError("structured output needs a vocabulary whose ids go from 0 on, and this one's have gaps")
    unknown = words["vocab"].get(words["unk_token"])
    return {
        "type": "Unigram",
        "unk_id": unknown,
        "vocab": [[piece, -1.0] for piece, _ in pieces],
        "byte_fallback": False,
    }


def _make_special(piece: str, place: int) -> dict[str, Any]:
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": place, "content": piece, **plain, "special": True}


def drops_first_space(backend: Any) -> bool:
    """Whether a tokenizer leaves out the space before a text's first word when it decodes."""
    pieces: dict[str, int] = backend.get_vocab(with_added_tokens=False)
    for piece, place in pieces.items():
        if piece[:1] == "\u2581" and piece[1:].isalnum():
            return not backend.decode([place], skip_special_tokens=False).startswith((" ", "\u2581"))
    return False
