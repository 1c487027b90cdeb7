"""A tokenizer from the metadata of a GGUF file, which holds no tokenizer.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import IntEnum
from typing import TypeVar

import tokenizers

from unspool.errors import LoadError, UnsupportedError, excerpt
from unspool.text.backend import (
    add_ends,
    build_byte_level,
    build_sentencepiece,
    build_unigram,
    find_merges,
    find_split,
    refusing_damage,
)
from unspool.text.bounds import check_added_tokens, check_charsmap, check_pieces
from unspool.text.tokenizer import Tokenizer

MAX_TOKENS = 2_000_000
MAX_MERGES = 8_000_000
MAX_TOKEN_CHARACTERS = 65_536
MAX_CHARSMAP_BYTES = 16 << 20

Item = TypeVar("Item", int, float, str)

_PREFIX = "tokenizer.ggml."
_SPECIAL_ID_KEYS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
    "sep_token": "seperator_token_id",  # so spelled in the format
    "cls_token": "cls_token_id",
    "mask_token": "mask_token_id",
}


class TokenType(IntEnum):
    """What a token is, by its number in `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def tokenizer_from_gguf(metadata: Mapping[str, object]) -> Tokenizer:
    """Build the tokenizer that the `tokenizer.ggml.*` keys of a GGUF file describe."""
    kind = _read_text(metadata, "model")
    if kind not in _BUILDERS:
        raise UnsupportedError(
            f"the file's tokenizer is of the kind {excerpt(kind)} (tokenizer.ggml.model), which can't be built; "
            f"known: {', '.join(_BUILDERS)}. Use the model's folder with its tokenizer.json"
        )
    vocabulary = _Vocabulary(metadata)
    with refusing_damage():
        backend = _BUILDERS[kind](vocabulary)
    vocabulary.add_marked_tokens(backend)
    adds_bos, adds_eos = vocabulary.find_ends(kind)
    special = vocabulary.special_tokens
    add_ends(
        backend,
        bos_token=special.get("bos_token") if adds_bos else None,
        eos_token=special.get("eos_token") if adds_eos else None,
    )
    return Tokenizer(backend, special_tokens=special, chat_template=_read_templates(metadata))


class _Vocabulary:
    """The checked lists of a file: tokens, their types and scores, and which of them are special."""

    def __init__(self, metadata: Mapping[str, object]) -> None:
        self.metadata = metadata
        self.tokens = _read_tokens(metadata)
        self.ids = {token: index for index, token in enumerate(self.tokens)}
        if len(self.ids) != len(self.tokens):
            twice = next(token for index, token in enumerate(self.tokens) if self.ids[token] != index)
            raise LoadError(
                f"tokenizer.ggml.tokens holds {excerpt(twice)} more than once, so an id has no token of its own"
            )
        types = _read_list(metadata, "token_type", int, MAX_TOKENS, length=len(self.tokens))
        self.types = types if types is not None else [int(TokenType.NORMAL)] * len(self.tokens)
        self.special_tokens = {
            name: self.tokens[token_id]
            for name, key in _SPECIAL_ID_KEYS.items()
            if (token_id := _read_id(metadata, key, len(self.tokens))) is not None
        }

    @property
    def split_name(self) -> str:
        """How the family cuts text; files older than the key say nothing."""
        return _read_text(self.metadata, "pre") if f"{_PREFIX}pre" in self.metadata else "default"

    def read_scores(self) -> list[float]:
        """The score of every token, which orders a sentencepiece vocabulary."""
        scores = _read_list(self.metadata, "scores", float, MAX_TOKENS, length=len(self.tokens))
        if scores is None:
            raise LoadError("tokenizer.ggml.scores is missing, and this kind of tokenizer can't be built without it")
        if not all(map(math.isfinite, scores)):
            raise LoadError("tokenizer.ggml.scores holds a score that is not a finite number")
        return scores

    def read_flag(self, key: str, default: bool) -> bool:
        """A yes or no of the file."""
        value = self.metadata.get(_PREFIX + key, default)
        if not isinstance(value, bool | int) or value not in (0, 1):
            raise LoadError(f"{_PREFIX}{key} must be true or false, not {excerpt(value)}")
        return bool(value)

    def find_ends(self, kind: str) -> tuple[bool, bool]:
        """Whether a text gets a first and a last token; if the file is silent, as its kind is used to."""
        adds_bos = kind == "llama" or (kind == "gpt2" and find_split(self.split_name).adds_bos)
        return self.read_flag("add_bos_token", adds_bos), self.read_flag("add_eos_token", kind == "t5")

    def add_marked_tokens(self, backend: tokenizers.Tokenizer) -> None:
        """Have control and user-defined tokens matched whole, the first kind left out where special ones are."""
        marked: list[tokenizers.AddedToken] = []
        special = set(self.special_tokens.values())
        for token, kind in zip(self.tokens, self.types, strict=True):
            is_special = kind in (TokenType.CONTROL, TokenType.UNKNOWN) or token in special
            if is_special or kind == TokenType.USER_DEFINED:
                marked.append(tokenizers.AddedToken(token, normalized=False, special=is_special))
        check_added_tokens([token.content for token in marked], "the control tokens of the file")
        with refusing_damage():
            backend.add_tokens(marked)


def _build_gpt2(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    lines = _read_list(vocabulary.metadata, "merges", str, MAX_MERGES)
    if lines is None:
        raise LoadError("tokenizer.ggml.merges is missing, and byte-level BPE can't be built without it")
    # The first token of a pair may itself be a space in files that don't spell bytes as letters.
    cuts = [line.find(" ", 1) for line in lines]
    if -1 in cuts:
        raise LoadError(f"tokenizer.ggml.merges holds {excerpt(lines[cuts.index(-1)])}, which is not a pair of tokens")
    merges = [(line[:cut], line[cut + 1 :]) for line, cut in zip(lines, cuts, strict=True)]
    return build_byte_level(
        vocabulary.ids,
        merges,
        vocabulary.split_name,
        adds_prefix_space=vocabulary.read_flag("add_space_prefix", False),
    )


def _build_llama(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    normal = [
        token for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True) if kind == TokenType.NORMAL
    ]
    return build_sentencepiece(
        vocabulary.ids,
        find_merges(normal, vocabulary.ids, vocabulary.read_scores()),
        unk_token=vocabulary.special_tokens.get("unk_token"),
        adds_space_prefix=vocabulary.read_flag("add_space_prefix", True),
    )


def _build_t5(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    pieces = list(zip(vocabulary.tokens, vocabulary.read_scores(), strict=True))
    unk_token = vocabulary.special_tokens.get("unk_token")
    if unk_token is None:
        raise LoadError("tokenizer.ggml.unknown_token_id is missing, and the kind 't5' can't encode a text without it")
    check_pieces(iter(vocabulary.tokens), "tokenizer.ggml.tokens")
    return build_unigram(
        pieces,
        unk_id=vocabulary.ids[unk_token],
        charsmap=_read_charsmap(vocabulary.metadata),
        adds_space_prefix=vocabulary.read_flag("add_space_prefix", True),
        removes_extra_spaces=vocabulary.read_flag("remove_extra_whitespaces", True),
    )


_BUILDERS = {"gpt2": _build_gpt2, "llama": _build_llama, "t5": _build_t5}


def _read_tokens(metadata: Mapping[str, object]) -> list[str]:
    tokens = _read_list(metadata, "tokens", str, MAX_TOKENS)
    if not tokens:
        raise LoadError("tokenizer.ggml.tokens is missing or empty, so the file has no vocabulary")
    if max(map(len, tokens)) > MAX_TOKEN_CHARACTERS:
        raise LoadError(f"tokenizer.ggml.tokens holds a token of more than {MAX_TOKEN_CHARACTERS} characters")
    # A vocabulary needs a text for every id. No text is encoded to this one.
    return [token or f"[EMPTY_{index}]" for index, token in enumerate(tokens)]


def _read_list(
    metadata: Mapping[str, object], key: str, kind: type[Item], longest: int, length: int | None = None
) -> list[Item] | None:
    """A list of the file, its items of one kind, its length bounded or known."""
    value = metadata.get(_PREFIX + key)
    if value is None:
        return None
    if hasattr(value, "tolist"):  # an array of numbers
        value = value.tolist()
    if not isinstance(value, list | tuple):
        raise LoadError(f"{_PREFIX}{key} must be a list, not {type(value).__name__}")
    if len(value) > longest or (length is not None and len(value) != length):
        expected = f"at most {longest}" if length is None else f"{length}, one a token"
        raise LoadError(f"{_PREFIX}{key} has {len(value)} entries; there must be {expected}")
    wanted = (int, float) if kind is float else (kind,)
    if not set(map(type, value)) <= set(wanted):
        raise LoadError(f"{_PREFIX}{key} holds something that is not {kind.__name__}")
    return list(value)


def _read_text(metadata: Mapping[str, object], key: str) -> str:
    value = metadata.get(_PREFIX + key)
    if not isinstance(value, str):
        raise LoadError(f"{_PREFIX}{key} must be a string, not {type(value).__name__}: the file has no tokenizer")
    return value


def _read_id(metadata: Mapping[str, object], key: str, num_tokens: int) -> int | None:
    value = metadata.get(_PREFIX + key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < num_tokens:
        raise LoadError(f"{_PREFIX}{key} is {excerpt(value)}, which is not an id of a vocabulary of {num_tokens}")
    return value


def _read_charsmap(metadata: Mapping[str, object]) -> bytes | None:
    """Sentencepiece's table of normal forms: the size of a trie, the trie, and the texts it points to."""
    numbers = _read_list(metadata, "precompiled_charsmap", int, MAX_CHARSMAP_BYTES)
    if not numbers:
        return None
    if not all(-128 <= number <= 255 for number in numbers):
        raise LoadError("tokenizer.ggml.precompiled_charsmap must hold bytes")
    charsmap = bytes(number & 0xFF for number in numbers)  # some files have them signed
    check_charsmap(charsmap, "tokenizer.ggml")
    size = int.from_bytes(charsmap[:4], "little")
    if len(charsmap) < 4 or size % 4 or size > len(charsmap) - 4:
        raise LoadError("tokenizer.ggml.precompiled_charsmap is damaged: its trie reaches past its end")
    return charsmap


def _read_templates(metadata: Mapping[str, object]) -> str | dict[str, str] | None:
    """The chat template, with the named ones beside it where a file has several."""
    prefix = "tokenizer.chat_template"
    found = {key: value for key, value in metadata.items() if key == prefix or key.startswith(prefix + ".")}
    templates: dict[str, str] = {}
    for key, value in found.items():
        if not isinstance(value, str):
            raise LoadError(f"{key} must be a string, not {type(value).__name__}")
        templates["default" if key == prefix else key.removeprefix(prefix + ".")] = value
    if list(templates) == ["default"]:
        return templates["default"]
    return templates or None
