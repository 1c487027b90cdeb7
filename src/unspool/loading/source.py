"""Opening a model's files: from a folder, a GGUF file, a short name or a hub id."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from unspool.errors import LoadError, ModelNotFoundError, SettingError, excerpt
from unspool.loading.catalogue import describe_unknown, find_entry, find_model
from unspool.loading.gguf import GGUFFile
from unspool.loading.hub import NO_OPTIONS, HubOptions, fetch, parse_hub_name
from unspool.loading.pickled import Report, find_pickles, open_pickles
from unspool.loading.quantised import open_quantised
from unspool.loading.safetensors_files import PICKLE_SUFFIXES, SafetensorsFiles, refuse_pickle
from unspool.loading.tensors import TensorFile
from unspool.numeric import is_number, is_token_id
from unspool.small_files import read_json_object

SMALL_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)

_GGUF_IDS = {
    "bos_token_id": "tokenizer.ggml.bos_token_id",
    "pad_token_id": "tokenizer.ggml.padding_token_id",
    "unk_token_id": "tokenizer.ggml.unknown_token_id",
}
_GGUF_EOS_IDS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
_GGUF_SAMPLING = {
    "temperature": ("general.sampling.temp", "general.sampling.temperature"),
    "top_k": ("general.sampling.top_k",),
    "top_p": ("general.sampling.top_p",),
    "min_p": ("general.sampling.min_p",),
}


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """An opened model: its settings, and its weights, not read yet."""

    location: Path
    kind: Literal["folder", "gguf"]
    config: dict[str, Any]  # config.json, or the GGUF metadata
    generation_config: dict[str, Any]
    tensors: TensorFile
    files: Mapping[str, Path] = field(default_factory=dict)


def open_source(
    name_or_path: str | Path,
    *,
    revision: str | None = None,
    offline: bool | None = None,
    hub: HubOptions = NO_OPTIONS,
    report: Report | None = None,
) -> OpenedModel:
    """Find and open a model: an existing folder or GGUF file, a short name, or a hub id, in this order.

    `report(done, total)` is called while pickles are rewritten, in bytes."""
    return _open_path(find_source(name_or_path, revision=revision, offline=offline, hub=hub), report)


def find_source(
    name_or_path: str | Path,
    *,
    revision: str | None = None,
    offline: bool | None = None,
    hub: HubOptions = NO_OPTIONS,
    has_weights: bool = True,
) -> Path:
    """Where a model lies: an existing path, a short name's file, or what was fetched from the hub."""
    if not isinstance(name_or_path, str | PathLike):
        raise SettingError(
            f"a model is named by a text or a path, not by a {type(name_or_path).__name__}: "
            "unspool.load('smollm2-135m'), or a folder, a .gguf file, a hub id"
        )
    name = os.fsdecode(name_or_path)
    if not name or "\0" in name:
        raise ModelNotFoundError("a model is named by a path, a short name or a hub id; the name given is empty")
    path = _find_path(name)
    if path is not None:
        _refuse_revision(revision, f"{name!r} is on this disk")
        return path
    entry = find_entry(name)
    if entry is not None:
        _refuse_revision(revision, f"{name!r} is a short name, which stands for one fixed file")
        file = find_model(name)
        if file is None:
            size = f"{entry.size_bytes / 1e6:.0f} MB"
            raise ModelNotFoundError(
                f"the model {entry.name!r} is not installed. To fetch it ({size}): unspool pull {entry.name}"
            )
        return file
    hub_name = parse_hub_name(name) if isinstance(name_or_path, str) else None
    if hub_name is None:
        looked_for = (
            "a folder",
            "a .gguf file",
            "a short name",
            "a hub id (owner/name or owner/name:file.gguf)",
        )
        if isinstance(name_or_path, PathLike) or _looks_like_path(name):
            raise ModelNotFoundError(_describe_missing(name))
        raise ModelNotFoundError(describe_unknown(name, looked_for))
    repo_id, filename = hub_name
    return fetch(repo_id, revision=revision, filename=filename, offline=offline, options=hub, has_weights=has_weights)


def _looks_like_path(name: str) -> bool:
    """Whether a name can only have been meant for a path: no short name and no hub id looks like that."""
    begins = (".", "~", "/", "\\")
    return name.startswith(begins) or name.endswith(("/", ".gguf", ".safetensors")) or name.count("/") > 1


def _describe_missing(name: str) -> str:
    """The error message for a path where nothing is: how far there is something, and what lies there."""
    try:
        path = Path(name).expanduser()
        there = next((part for part in path.parents if part.is_dir()), None)
        near = sorted(one.name for one in there.iterdir())[:10_000] if there == path.parent and there else []
    except (OSError, RuntimeError):  # too long; the home of an unknown user; a folder that can't be read
        return f"there is no folder and no file {excerpt(name)}. Check the path"
    where = "" if there is None else f" {excerpt(str(there.absolute()))} is there"
    meant = difflib.get_close_matches(path.name, near, n=1, cutoff=0.6)
    hint = f", and has {excerpt(meant[0])}" if meant else ""
    return f"there is no folder and no file {excerpt(name)}.{where}{hint}{'.' if where else ''} Check the path"


def _find_path(name: str) -> Path | None:
    try:
        path = Path(name).expanduser()
        return path if path.exists() else None
    except (OSError, RuntimeError):  # a name that is too long; the home of an unknown user
        return None


def _refuse_revision(revision: str | None, reason: str) -> None:
    if revision is not None:
        raise SettingError(f"revision={revision!r} can't be used: {reason}. Revisions belong to hub ids")


def _open_path(path: Path, report: Report | None) -> OpenedModel:
    if path.is_dir():
        ggufs = [] if (path / "config.json").exists() else sorted(path.glob("*.gguf"))
        if len(ggufs) > 1:
            names = ", ".join(gguf.name for gguf in ggufs[:8])
            raise LoadError(f"{path} holds {len(ggufs)} GGUF files: give the path of one of them ({names})")
        return _open_gguf(ggufs[0]) if ggufs else _open_folder(path, report)
    if path.suffix == ".gguf":
        return _open_gguf(path)
    if path.suffix in PICKLE_SUFFIXES:
        refuse_pickle(path)
    hint = "Give the folder it lies in" if path.suffix == ".safetensors" else "Give a folder or a .gguf file"
    raise LoadError(f"{path} is not a model that can be opened by itself. {hint}")


def _open_folder(folder: Path, report: Report | None) -> OpenedModel:
    config = folder / "config.json"
    pickles = find_pickles(folder) if folder.is_dir() and config.is_file() else {}
    tensors: TensorFile = open_pickles(folder, report) if pickles else SafetensorsFiles(folder)
    if not config.is_file():
        raise LoadError(f"{folder} has weights and no config.json, which says what model they are")
    generation = folder / "generation_config.json"
    settings, weights = open_quantised(read_json_object(config), tensors, folder)
    return OpenedModel(
        location=folder,
        kind="folder",
        config=settings,
        # A bias may be -Infinity; other values are checked when they are used.
        generation_config=read_json_object(generation, allows_infinity=True) if generation.is_file() else {},
        tensors=weights,
        files={name: folder / name for name in SMALL_FILES if (folder / name).is_file()},
    )


def _open_gguf(path: Path) -> OpenedModel:
    file = GGUFFile(path)
    return OpenedModel(
        location=path,
        kind="gguf",
        config=dict(file.metadata),
        generation_config=_read_generation(file.metadata, path),
        tensors=file,
    )


def _read_generation(metadata: dict[str, object], path: Path) -> dict[str, Any]:
    """The special ids and sampling settings of GGUF metadata, under the names of generation_config.json."""
    settings: dict[str, Any] = {}
    for setting, key in _GGUF_IDS.items():
        if (token := _read_token_id(metadata, key, path)) is not None:
            settings[setting] = token
    stops = [_read_token_id(metadata, key, path) for key in _GGUF_EOS_IDS]
    eos = list(dict.fromkeys(token for token in stops if token is not None))
    if eos:
        settings["eos_token_id"] = eos[0] if len(eos) == 1 else eos
    for setting, keys in _GGUF_SAMPLING.items():
        found = next((metadata[key] for key in keys if key in metadata), None)
        if found is None:
            continue
        if not is_number(found):
            raise LoadError(f"{path} gives {setting} as {str(found)[:80]!r}, which is not a number")
        settings[setting] = int(found) if setting == "top_k" else float(found)
    return settings


def _read_token_id(metadata: dict[str, object], key: str, path: Path) -> int | None:
    token = metadata.get(key)
    if token is None or token in (-1, 2**32 - 1):  # how converters write "none"
        return None
    if not is_token_id(token):
        raise LoadError(f"{path} gives {key} as {str(token)[:80]!r}, which is not a token id")
    return token
