"""Hostile tokenizer.json files: refused before the library could abort, hang or fill the memory."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from unspool.errors import InputError, LoadError
from unspool.text.bounds import check_tokenizer
from unspool.text.tokenizer import Tokenizer

BPE = {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}
PLAIN: dict[str, Any] = {"version": "1.0", "added_tokens": [], "model": BPE}


def replace(pattern: Any, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def sequence(rules: list[Any], name: str = "normalizers") -> dict[str, Any]:
    return {"type": "Sequence", name: rules}


def test_characters_for_characters_lengthen_a_text_once() -> None:
    """Thirty letters, each put for another letter of two bytes, make at most two bytes of one."""
    letters = [replace({"String": chr(97 + index % 26)}, chr(0x250 + index)) for index in range(30)]
    check_tokenizer({**PLAIN, "normalizer": sequence(letters)}, "here")
    check_tokenizer({**PLAIN, "decoder": sequence(letters, "decoders")}, "here")
    between = [rule for letter in letters[:5] for rule in (letter, replace({"String": "a"}, "bb"))]
    with pytest.raises(LoadError, match="times as long"):
        check_tokenizer({**PLAIN, "normalizer": sequence(between)}, "here")


def nest(rule: Any, times: int) -> Any:
    for _ in range(times):
        rule = sequence([rule, rule])
    return rule


HOSTILE: dict[str, dict[str, Any]] = {
    "replacements that grow": {"normalizer": sequence([replace({"String": "a"}, "a" * 1000)] * 4)},
    "a pattern that grows": {"normalizer": replace({"Regex": "a*?"}, "b" * 100)},
    "sequences in sequences": {"normalizer": nest({"type": "NFC"}, 12)},
    "a long prefix": {"normalizer": {"type": "Prepend", "prepend": "x" * 1000}},
    "a long table": {
        "normalizer": {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(bytes(4) + b"x" * 999).decode()}
    },
    "a decoder that takes the square": {"decoder": replace({"Regex": "a*b"}, "")},
    "large counts": {"pre_tokenizer": split("a{1,99999}b")},
    "a long pattern": {"pre_tokenizer": split("a" * 5000)},
    "a decoder that grows": {"decoder": sequence([replace({"String": "a"}, "a" * 99)] * 4, "decoders")},
    "a template that repeats": {
        "post_processor": {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 1000}
    },
    "a template of many tokens": {
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [],
            "special_tokens": {"x": {"id": "x", "ids": [0] * 100_000, "tokens": ["a"] * 100_000}},
        }
    },
    "a long suffix": {"model": {**BPE, "end_of_word_suffix": "x" * 10_000}},
    "long words": {"model": {"type": "WordPiece", "vocab": {"a": 0}, "max_input_chars_per_word": 10**9}},
    "a far id": {"model": {**BPE, "vocab": {**BPE["vocab"], "far": 2**31}}},
    "long pieces": {"model": {"type": "Unigram", "unk_id": 0, "vocab": [["a", 0.0], ["a" * 60_000, -1.0]]}},
    "many added tokens": {"added_tokens": [{"id": i, "content": f"<{i}>" + "x" * 30} for i in range(150_000)]},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({**PLAIN, **HOSTILE[name]}))
    with pytest.raises(LoadError):
        Tokenizer.from_folder(tmp_path)
    with pytest.raises(LoadError):  # by the check, not by the library
        check_tokenizer({**PLAIN, **HOSTILE[name]}, "tokenizer.json")


def test_a_rule_given_twice_is_refused(tmp_path: Path) -> None:
    text = json.dumps(PLAIN)[:-1] + ', "normalizer": null, "normalizer": {"type": "NFC"}}'
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(LoadError, match="twice"):
        Tokenizer.from_folder(tmp_path)


def test_rules_in_use_are_accepted() -> None:
    marks = [{"type": "Prepend", "prepend": "▁"}, replace({"String": " "}, "▁")]
    check_tokenizer({**PLAIN, "normalizer": sequence(marks)}, "x")
    squeezed = [replace({"Regex": " {2,}"}, "▁"), {"type": "NFKC"}, replace({"String": "``"}, '"')]
    check_tokenizer({**PLAIN, "normalizer": sequence([*squeezed, *marks])}, "x")
    check_tokenizer({**PLAIN, "decoder": sequence([replace({"String": "▁"}, " "), {"type": "Fuse"}], "decoders")}, "x")


@pytest.mark.parametrize(
    ("key", "token"), [("9" * 5000, "x"), ("7", "\ud800"), ("-1", "x"), ("1_0", "x"), ("²", "x"), ("7", "x" * 5000)]
)
def test_damaged_added_tokens(key: str, token: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(PLAIN))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": {key: {"content": token}}}))
    with pytest.raises(LoadError):
        Tokenizer.from_folder(tmp_path)


def test_many_declared_tokens_are_added_at_once(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(PLAIN))
    declared = {str(2 + i): {"content": f"<{i}>", "special": i % 2 == 0} for i in range(20_000)}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": declared}))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode("a<19999><0>") == [0, 20_001, 2]
    assert tokenizer.decode([0, 20_001, 2], skip_special_tokens=True).replace(" ", "") == "a<19999>"


def test_a_vocabulary_without_an_unknown_token(tmp_path: Path) -> None:
    model = {"type": "Unigram", "unk_id": None, "vocab": [["a", -1.0]], "byte_fallback": False}
    (tmp_path / "tokenizer.json").write_text(json.dumps({**PLAIN, "model": model}))
    with pytest.raises(InputError, match="can't be encoded by this tokenizer"):
        Tokenizer.from_folder(tmp_path).encode("z")


@pytest.mark.parametrize("name", [{}, [], None, 3])
def test_a_template_without_a_name(name: Any, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(PLAIN))
    template = [{"name": "default", "template": "x"}, {"name": name, "template": "y"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    with pytest.raises(LoadError, match="chat_template must be"):
        Tokenizer.from_folder(tmp_path)
