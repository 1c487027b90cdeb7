"""Where `from_pretrained` reads from: the name, the folder inside it, and the hub's own arguments."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from unspool.errors import LoadError, SettingError, UnsupportedError, excerpt
from unspool.loading.hub import HubOptions, parse_hub_name


@dataclass(frozen=True, slots=True)
class ModelLocation:
    """A model's name or path, with what says how to fetch it."""

    name: str | Path
    revision: str | None
    offline: bool | None
    hub: HubOptions


def read_location(name: str | PathLike[str], applied: dict[str, Any]) -> ModelLocation:
    """Take the keywords about the location out of `applied`."""
    token = applied.pop("token", None)
    older = applied.pop("use_auth_token", None)
    if token is not None and older is not None:
        raise SettingError("`token` and `use_auth_token` are two names of one argument; give `token`")
    hub = HubOptions(
        cache_dir=applied.pop("cache_dir", None),
        token=older if token is None else token,
        force_download=bool(applied.pop("force_download", False)),
    )
    revision = applied.pop("revision", None)
    offline = True if applied.pop("local_files_only", None) else None
    subfolder = applied.pop("subfolder", None) or ""
    file = applied.pop("gguf_file", None)
    text = fspath(name)
    path = Path(text).expanduser()
    if path.exists():
        found = _enter(path, subfolder)
        return ModelLocation(_enter(found, file) if file else found, None, offline, hub)
    if subfolder:
        raise UnsupportedError(
            f"subfolder={excerpt(subfolder)} can't be used with the hub's {text!r:.120}: files at the top of a "
            "repository are fetched. Download it, and give the folder's path"
        )
    if file and parse_hub_name(f"{text}:{file}") is None:
        raise LoadError(f"gguf_file={excerpt(file)} of {text!r:.120} is not a file of a hub id")
    return ModelLocation(f"{text}:{file}" if file else text, revision, offline, hub)


def _enter(path: Path, inner: Any) -> Path:
    """A path inside a folder, which may not lead out of it."""
    if not inner:
        return path
    if not isinstance(inner, str) or "\0" in inner:
        raise SettingError(f"{excerpt(inner)} is not the name of something inside {path}")
    found = path / inner
    if not found.resolve().is_relative_to(path.resolve()):
        raise LoadError(f"{excerpt(inner)} leads out of {path}; give a path inside it")
    if not found.exists():
        raise LoadError(f"{path} has no {excerpt(inner)}")
    return found
