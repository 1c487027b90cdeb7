"""tokenizer.json: mutated, loaded, and used on texts that hostile rules would make much of."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz.mutate import dump_json, hostile_string, mutate_bytes, mutate_json
from unspool.text.tokenizer import Tokenizer

NAME = "tokenizer_json"
SHORT = 25

_LETTERS = list("abcdefgh ▁.é") + [f"<0x{code:02X}>" for code in range(256)]
_TEXTS = (
    "",
    "a",
    "hello abc\n\n  a b",
    "a" * 3000,
    "a" * 60_000 + "cb",
    "日本 \U0001f680 é" * 50,
    " " * 2000,
    "<s>a</s>" * 200,
    "\x00\x1b",
)
_PATTERNS = (
    r"\s+",
    "a*b",
    r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|\s+",
    "(a+)+b",
    "(a|b|ab)*c",
    "a{1,9}",
    "",
    "(",
    r"\1",
    "x*x*y",
)
_MODELS: tuple[dict[str, Any], ...] = (
    {
        "type": "BPE",
        "vocab": {**{token: i for i, token in enumerate(_LETTERS)}, "ab": 500, "abc": 501},
        "merges": [["a", "b"], ["ab", "c"]],
        "byte_fallback": True,
        "fuse_unk": True,
        "unk_token": None,
        "dropout": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "ignore_merges": False,
    },
    {
        "type": "WordPiece",
        "vocab": {"[UNK]": 0, "a": 1, "##b": 2},
        "unk_token": "[UNK]",
        "max_input_chars_per_word": 100,
    },
    {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["a", -1.0], ["ab", -2.5], ["▁", -3.0]]},
    {"type": "WordLevel", "vocab": {"a": 0, "<unk>": 1}, "unk_token": "<unk>"},
)


# Whole tokenizers in the manner of those in use: most inputs are one of them with a part exchanged or a value changed.
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_MARKS = {
    "type": "Sequence",
    "normalizers": [
        {"type": "Prepend", "prepend": "▁"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
    ],
}
_WHOLE: tuple[dict[str, Any], ...] = (
    {"normalizer": None, "pre_tokenizer": _BYTES, "decoder": _BYTES, "model": _MODELS[0]},
    {
        "normalizer": _MARKS,
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": _MODELS[0],
    },
    {
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": None,
            "lowercase": True,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": _MODELS[1],
    },
    {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "NFKC"},
                {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "},
                {"type": "Strip", "strip_left": True, "strip_right": True},
            ],
        },
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
        "decoder": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
        "model": _MODELS[2],
    },
    {
        "normalizer": {"type": "Lowercase"},
        "pre_tokenizer": {"type": "Whitespace"},
        "decoder": None,
        "model": _MODELS[3],
    },
)


def make(rng: Random) -> tuple[bytes, list[str]]:
    """A tokenizer of a usual kind, in which a part or two are exchanged and sometimes a value is changed."""
    described: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_make_added(rng, i) for i in range(rng.randrange(4))],
        "post_processor": None,
        **rng.choice(_WHOLE),
    }
    for _ in range(rng.choice((0, 1, 1, 2))):
        part, maker = rng.choice(tuple(_MAKERS.items()))
        described[part] = maker(rng)
    if rng.random() < 0.3:
        described = mutate_json(rng, described, rng.choice((1, 1, 2)))
    data = dump_json(described)
    data = mutate_bytes(rng, data, 2) if rng.random() < 0.05 else data
    return data, rng.sample(_TEXTS, 3)


def _make_normalizer(rng: Random, depth: int) -> Any:
    roll = rng.randrange(7)
    if roll == 0:
        return None
    if roll == 1 and depth < 4:
        times = rng.choice((1, 2, 4, *([100] if depth == 0 else [])))  # of hundreds in hundreds no input could be made
        return {"type": "Sequence", "normalizers": [_make_normalizer(rng, depth + 1) or {"type": "NFC"}] * times}
    if roll == 2:
        return {"type": "Prepend", "prepend": rng.choice(("▁", "x" * 5000))}
    if roll == 3:
        return {"type": rng.choice(("NFC", "NFKD", "Lowercase", "StripAccents", "Nmt", "ByteLevel"))}
    pattern = {"String": rng.choice((" ", "a", ""))} if roll < 6 else {"Regex": rng.choice(_PATTERNS)}
    return {"type": "Replace", "pattern": pattern, "content": rng.choice(("▁", "b", "a" * 9, "a" * 1000, ""))}


def _make_cut(rng: Random) -> Any:
    split = {"type": "Split", "pattern": {"Regex": rng.choice(_PATTERNS)}, "behavior": "Isolated", "invert": False}
    return rng.choice((None, {"type": "Whitespace"}, split, {"type": "Sequence", "pretokenizers": [split, split]}))


def _make_template(rng: Random) -> Any:
    text = {"Sequence": {"id": "A", "type_id": 0}}
    special = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    single = [special, *[text] * rng.choice((1, 1, 1, 2, 500))]
    times = rng.choice((1, 1, 1, 1, 9000))
    tokens = {"<s>": {"id": "<s>", "ids": [1] * times, "tokens": ["<s>"] * times}}
    template = {"type": "TemplateProcessing", "single": single, "pair": [text], "special_tokens": tokens}
    return rng.choice((None, template))


def _make_added(rng: Random, place: int) -> dict[str, Any]:
    content = rng.choice(("<s>", "</s>", f"<{place}>", "a b", f"<{place}>", hostile_string(rng)))
    flags = {name: rng.random() < 0.3 for name in ("single_word", "lstrip", "rstrip", "normalized", "special")}
    return {"id": 600 + place, "content": content, **flags}


def _make_truncation(rng: Random) -> Any:
    return {
        "max_length": rng.choice((0, 4, 1 << 40)),
        "stride": rng.choice((0, 9)),
        "strategy": "LongestFirst",
        "direction": "Left",
    }


def _make_decoder(rng: Random) -> Any:
    kinds = ({"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Metaspace", "replacement": "▁"}, _BYTES)
    replace = {"type": "Replace", "pattern": {"Regex": rng.choice(_PATTERNS)}, "content": rng.choice(("", "b"))}
    return rng.choice((None, *kinds, {"type": "Sequence", "decoders": [replace, rng.choice(kinds)]}))


_MAKERS = {
    "truncation": _make_truncation,
    "normalizer": lambda rng: _make_normalizer(rng, 0),
    "pre_tokenizer": _make_cut,
    "post_processor": _make_template,
    "decoder": _make_decoder,
    "model": lambda rng: rng.choice(_MODELS),
}


def run(given: tuple[bytes, list[str]], folder: Path) -> None:
    data, texts = given
    (folder / "tokenizer.json").write_bytes(data)
    tokenizer = Tokenizer.from_folder(folder)
    for text in texts:
        ids = tokenizer.encode(text)
        tokenizer.decode(ids, skip_special_tokens=True)
        tokenizer.convert_ids_to_tokens(ids[:50])
