"""Reading a tokenizer from the files of a model's folder, and writing it back."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers

from unspool.errors import LoadError, ModelNotFoundError, excerpt
from unspool.small_files import make_folder, parse_json_object, read_bytes, read_json_object, read_text, write_text
from unspool.text.backend import add_ends, build_byte_level, refusing_damage
from unspool.text.bounds import check_added_tokens, check_tokenizer, check_vocabulary, is_unicode
from unspool.text.sentencepiece_folder import LLAMA_FILE, SPIECE, read_pieces, read_spiece
from unspool.text.special_tokens import NAMED_TOKENS

MAX_TOKENIZER_BYTES = 64 << 20  # as Python's objects they take some twenty times as much
MAX_CONFIG_BYTES = 32 << 20
MAX_TEMPLATE_BYTES = 1 << 20
TEMPLATES = "additional_chat_templates/*.jinja"  # of a folder, beside its own template

_ID = re.compile("[0-9]{1,9}")
_READ_FIRST = ("tokenizer.json", "merges.txt")  # if a folder has them beside tokenizer.model
_FLAGS = ("lstrip", "rstrip", "single_word", "normalized")


@dataclass
class TokenizerParts:
    """What a tokenizer is made of, wherever it came from."""

    backend: tokenizers.Tokenizer
    special_tokens: dict[str, str] = field(default_factory=dict)  # bos_token, eos_token, … to their text
    chat_template: str | dict[str, str] | None = None
    cleans_up_spaces: bool = False


def read_folder(folder: Path) -> TokenizerParts:
    """Read a folder's vocabulary, with the special tokens and templates beside it.

    It is `tokenizer.json`, or else `spiece.model`, or `vocab.json` and `merges.txt`, or `tokenizer.model`.
    """
    if not folder.is_dir():
        raise ModelNotFoundError(f"there is no folder {str(folder)!r} to read a tokenizer from")
    config = _read_json(folder / "tokenizer_config.json", MAX_CONFIG_BYTES)
    special_map = _read_json(folder / "special_tokens_map.json", MAX_CONFIG_BYTES)
    declared = {**special_map, **{name: value for name, value in config.items() if value is not None}}
    if not (folder / "tokenizer.json").is_file() and (folder / SPIECE).is_file():
        backend, named = read_spiece(folder, config)
        declared = {**named, **declared}
    elif (folder / LLAMA_FILE).is_file() and not any((folder / name).is_file() for name in _READ_FIRST):
        backend, named = read_pieces(folder, config)
        declared = {**named, **declared}
    else:
        backend = _read_backend(folder, config)
    _add_declared_tokens(backend, declared)
    special_tokens = {name: token for name in NAMED_TOKENS if (token := _token_text(declared.get(name), name))}
    return TokenizerParts(
        backend=backend,
        special_tokens=special_tokens,
        chat_template=_read_chat_template(folder, config),
        cleans_up_spaces=config.get("clean_up_tokenization_spaces") is True and not _is_bpe(backend),
    )


def write_folder(parts: TokenizerParts, folder: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`, from which `read_folder` makes the same again."""
    make_folder(folder)
    added = parts.backend.get_added_tokens_decoder().values()
    named = set(parts.special_tokens.values())
    template: object = parts.chat_template
    if isinstance(parts.chat_template, Mapping):
        template = [{"name": name, "template": text} for name, text in parts.chat_template.items()]
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": parts.cleans_up_spaces,
        "padding_side": "left",
        **parts.special_tokens,
        "additional_special_tokens": [token.content for token in added if token.special and token.content not in named],
        **({} if template is None else {"chat_template": template}),
    }
    write_text(folder / "tokenizer.json", parts.backend.to_str(pretty=False))
    write_text(folder / "tokenizer_config.json", json.dumps(config, ensure_ascii=False, indent=2) + "\n")


def _read_backend(folder: Path, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    if (folder / "tokenizer.json").is_file():
        path = folder / "tokenizer.json"
        data = read_bytes(path, MAX_TOKENIZER_BYTES)
        check_tokenizer(parse_json_object(data, str(path), hook=_refuse_rules_given_twice), str(path))
        try:
            with refusing_damage():
                backend = tokenizers.Tokenizer.from_buffer(data)
        except Exception as error:  # the library raises plain Exception for whatever it can't parse
            raise LoadError(f"{folder / 'tokenizer.json'} is not a tokenizer: {error}") from error
        # Length is the caller's to choose, a call at a time.
        backend.no_truncation()
        backend.no_padding()
        return backend
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        return _read_vocabulary_and_merges(folder, config)
    raise ModelNotFoundError(
        f"{folder} has no tokenizer: none of tokenizer.json, spiece.model, tokenizer.model, source.spm with "
        "vocab.json, vocab.json with merges.txt is there"
    )


def _refuse_rules_given_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Of a rule that stands there twice one would be checked and another one used; vocabularies may have a token so."""
    found = dict(pairs)
    if len(found) != len(pairs) and not all(type(value) is int for _, value in pairs):
        raise ValueError("a key occurs twice")
    return found


def _read_vocabulary_and_merges(folder: Path, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    vocabulary = _read_json(folder / "vocab.json", MAX_TOKENIZER_BYTES)
    check_vocabulary(vocabulary, folder / "vocab.json")
    text = read_text(folder / "merges.txt", MAX_TOKENIZER_BYTES)
    lines = [line for line in text.split("\n") if line and not line.startswith("#version")]
    merges = [tuple(line.split(" ")) for line in lines]
    if bad := next((line for line, pair in zip(lines, merges, strict=True) if len(pair) != 2), None):
        raise LoadError(f"{folder / 'merges.txt'} has a line that is not two tokens: {excerpt(bad)}")
    pairs = [(pair[0], pair[1]) for pair in merges]
    backend = build_byte_level(vocabulary, pairs, "gpt-2", adds_prefix_space=config.get("add_prefix_space") is True)
    ends = [
        _token_text(config.get(name), name) if config.get(f"add_{name}") is True else None
        for name in ("bos_token", "eos_token")
    ]
    for end in ends:
        if end is not None and backend.token_to_id(end) is None:
            raise LoadError(f"{folder / 'tokenizer_config.json'} adds {excerpt(end)}, which vocab.json does not have")
    add_ends(backend, bos_token=ends[0], eos_token=ends[1])
    return backend


def _add_declared_tokens(backend: tokenizers.Tokenizer, declared: Mapping[str, Any]) -> None:
    """Make the tokens that only the configuration knows part of the vocabulary, in the order of their ids."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    by_id = declared.get("added_tokens_decoder") or {}
    if not isinstance(by_id, dict) or not all(_ID.fullmatch(key) for key in by_id):
        raise LoadError("tokenizer_config.json: added_tokens_decoder must map ids to tokens")
    added: dict[str, tokenizers.AddedToken] = {}
    ids: dict[str, int] = {}
    for key, value in sorted(by_id.items(), key=lambda item: int(item[0])):
        token = _added_token(value, f"added_tokens_decoder[{key}]", is_special=False)
        if token is not None and token.content not in known and token.content not in added:
            added[token.content] = token
            ids[token.content] = int(key)
    for name, value in _list_special_tokens(declared):
        token = _added_token(value, name, is_special=True)
        if token is not None and token.content not in known:
            added.setdefault(token.content, token)
    check_added_tokens(list(added), "tokenizer_config.json")
    with refusing_damage():
        backend.add_tokens(list(added.values()))  # all at once: the library builds its search anew each time
    for text, index in ids.items():
        if backend.token_to_id(text) != index:
            raise LoadError(
                f"tokenizer_config.json gives {excerpt(text)} the id {index}, but the vocabulary leads to "
                f"{backend.token_to_id(text)}; the two files are not of the same model"
            )


def _list_special_tokens(declared: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The named special tokens, then the unnamed ones under both names that transformers has had for them."""
    found = [(name, declared.get(name)) for name in NAMED_TOKENS]
    for key in ("additional_special_tokens", "extra_special_tokens"):
        others = declared.get(key) or []
        if not isinstance(others, list | dict):
            raise LoadError(f"tokenizer_config.json: {key} must be a list")
        found += [(key, value) for value in (others.values() if isinstance(others, dict) else others)]
    return found


def _added_token(value: Any, name: str, *, is_special: bool) -> tokenizers.AddedToken | None:
    text = _token_text(value, name)
    if text is None:
        return None
    flags = value if isinstance(value, dict) else {}
    chosen = {flag: bool(flags[flag]) for flag in _FLAGS if flag in flags}
    is_special = is_special or flags.get("special") is True
    return tokenizers.AddedToken(text, **{"normalized": not is_special, **chosen}, special=is_special)


def _token_text(value: Any, name: str) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    if value is None or value == "":
        return None
    if not isinstance(value, str) or len(value) > 4096:
        raise LoadError(f"tokenizer_config.json: {name} must be a short string, not {excerpt(value)}")
    if not is_unicode(value):
        raise LoadError(f"tokenizer_config.json: {name} is {excerpt(value)}, which is not valid Unicode")
    return value


def _read_chat_template(folder: Path, config: Mapping[str, Any]) -> str | dict[str, str] | None:
    """The template file if there is one, which holds over the template in the configuration."""
    named = {path.stem: read_text(path, MAX_TEMPLATE_BYTES) for path in sorted(folder.glob(TEMPLATES))[:100]}
    path = folder / "chat_template.jinja"
    if path.is_file():
        main = read_text(path, MAX_TEMPLATE_BYTES)
        return {"default": main, **named} if named else main
    found = _read_json(folder / "chat_template.json", MAX_CONFIG_BYTES).get("chat_template")
    template = config.get("chat_template") if found is None else found
    if isinstance(template, list):
        entries = [entry for entry in template if isinstance(entry, dict) and isinstance(entry.get("name"), str)]
        if len(entries) != len(template):
            entries = [{}]  # refused below
        template = {entry.get("name"): entry.get("template") for entry in entries}
    if template is None or isinstance(template, str):
        return template
    if isinstance(template, dict) and all(isinstance(text, str) for pair in template.items() for text in pair):
        return template
    raise LoadError(f"{folder}: chat_template must be a string, or a list of names and templates")


def _is_bpe(backend: tokenizers.Tokenizer) -> bool:
    # Cleaning up was made for WordPiece; on BPE it takes away spaces that belong to the text.
    return isinstance(backend.model, tokenizers.models.BPE)


def _read_json(path: Path, max_bytes: int) -> dict[str, Any]:
    # Tokenizers' files are edited by hand a lot: a key that stands there twice counts as others count it, the last one.
    return read_json_object(path, max_bytes, is_strict=False) if path.is_file() else {}
