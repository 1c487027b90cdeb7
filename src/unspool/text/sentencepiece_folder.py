"""Tokenizers of folders that have sentencepiece files only: T5's and Pegasus's `spiece.model`, Llama's
`tokenizer.model`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import tokenizers

from unspool.errors import LoadError, UnsupportedError
from unspool.small_files import read_json_object
from unspool.text.backend import add_ends
from unspool.text.sentencepiece_file import PieceKind, SentencePiece, SentencePieces, build_pieces, read_sentencepieces

SPIECE: Final = "spiece.model"
LLAMA_FILE: Final = "tokenizer.model"
# Kinds whose vocabulary is the file's pieces alone.
_PLAIN_KINDS: Final = ("llama", "codellama", "mistral", "mixtral", "gemma", "gemma2", "gemma3", "gemma3_text", "yi")
_NAMES: Final = {"bos_token": ("<s>", "<bos>"), "eos_token": ("</s>", "<eos>"), "pad_token": ("<pad>",)}
MAX_EXTRA: Final = 10_000
MAX_CONFIG_BYTES: Final = 1 << 20


def read_spiece(folder: Path, config: Mapping[str, Any]) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """The tokenizer of a folder's `spiece.model`, and its special tokens by name."""
    path = folder / SPIECE
    kind = _find_kind(folder, config)
    if kind not in ("t5", "mt5", "umt5", "pegasus"):
        raise UnsupportedError(
            f"{path} is the vocabulary of a {kind or 'model of unknown kind'}, which puts tokens of its own beside it; "
            "those of T5 and Pegasus are known. Use a folder with tokenizer.json"
        )
    model = read_sentencepieces(path)
    backend, named = _build_pegasus(model, path, config) if kind == "pegasus" else _build_t5(model, path, config)
    for name, token in named.items():
        if backend.token_to_id(token) is None:
            raise LoadError(f"{path} has no token {token!r:.40} to be the {name}")
    add_ends(backend, bos_token=None, eos_token=named["eos_token"])
    return backend, named


def read_pieces(folder: Path, config: Mapping[str, Any]) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """The tokenizer of a folder's `tokenizer.model`, and its special tokens by name."""
    path = folder / LLAMA_FILE
    kind = _find_kind(folder, config)
    if kind not in _PLAIN_KINDS:
        raise UnsupportedError(
            f"{path} is the vocabulary of a {kind or 'model of unknown kind'}, which may put tokens of its own beside "
            f"it; those of {', '.join(_PLAIN_KINDS)} are known. Use a folder with tokenizer.json"
        )
    model = read_sentencepieces(path)
    backend = build_pieces(model, str(path))
    assert model.unk_id is not None  # build_pieces() raises
    controls = {piece.text for piece in model.pieces if piece.kind == PieceKind.CONTROL}
    named = {"unk_token": model.pieces[model.unk_id].text}
    for name, texts in _NAMES.items():
        found = next((text for text in texts if text in controls), None)
        named |= {} if found is None else {name: found}
    adds_bos, adds_eos = config.get("add_bos_token", True), config.get("add_eos_token", False)
    add_ends(
        backend,
        bos_token=named.get("bos_token") if adds_bos else None,
        eos_token=named.get("eos_token") if adds_eos else None,
    )
    return backend, named


def _find_kind(folder: Path, config: Mapping[str, Any]) -> str:
    name = config.get("tokenizer_class")
    if isinstance(name, str):
        return name.removesuffix("Fast").removesuffix("Tokenizer").lower()[:40]
    path = folder / "config.json"
    kind = read_json_object(path, MAX_CONFIG_BYTES, is_strict=False).get("model_type") if path.is_file() else None
    return str(kind)[:40] if isinstance(kind, str) else ""


def _build_t5(
    model: SentencePieces, path: Path, config: Mapping[str, Any]
) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """T5: the file's pieces, then sentinels that count down."""
    num_extra = _read_count(config, "extra_ids", 100)
    known = {piece.text for piece in model.pieces}
    sentinels = [
        SentencePiece(text, 0.0, PieceKind.CONTROL)
        for index in reversed(range(num_extra))
        if (text := f"<extra_id_{index}>") not in known
    ]
    backend = build_pieces(model, str(path), pieces=[*model.pieces, *sentinels], unk_id=model.unk_id)
    return backend, {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


def _build_pegasus(
    model: SentencePieces, path: Path, config: Mapping[str, Any]
) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """Pegasus: pad, end and two masks first, then unused tokens up to the offset, then the file's pieces from 2 on."""
    offset = _read_count(config, "offset", 103)
    names = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>", "mask_token": "<mask_2>"}
    first = [names["pad_token"], names["eos_token"], "<mask_1>", names["mask_token"]] if offset else ["<pad>", "</s>"]
    unused = [f"<unk_{index}>" for index in range(2, offset)]
    marked = [SentencePiece(text, 0.0, PieceKind.CONTROL) for text in (*first, *unused)]
    if not offset:
        names.pop("mask_token")
    rest = [piece for piece in model.pieces[2:] if piece.text not in {one.text for one in marked}]
    if len(rest) != len(model.pieces) - 2 or model.unk_id is None or model.unk_id < 2:
        raise LoadError(f"{path} is not a Pegasus vocabulary: a token of it has one of the places that Pegasus fills")
    return build_pieces(model, str(path), pieces=[*marked, *rest], unk_id=model.unk_id + len(marked) - 2), names


def _read_count(config: Mapping[str, Any], name: str, default: int) -> int:
    value = config.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_EXTRA:
        raise LoadError(
            f"tokenizer_config.json has {name}={value!r:.40}, where a number from 0 to {MAX_EXTRA} is needed"
        )
    return value
