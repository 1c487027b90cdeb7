"""Where a file of settings lies: a folder, a path, or the hub."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from unspool.errors import MissingExtraError, ModelNotFoundError

HUB_ID = re.compile(r"[\w.-]{1,96}(/[\w.-]{1,96})?")
HUB_OPTIONS = (
    "cache_dir",
    "force_download",
    "local_files_only",
    "token",
    "revision",
    "subfolder",
    "repo_type",
)


def find_config_file(source: str | os.PathLike[str], file_name: str, options: dict[str, Any]) -> Path:
    """The settings file of a folder, a file itself, or a hub repository's (through `huggingface_hub`)."""
    path = Path(source)
    if path.is_file():
        return path
    if path.is_dir():
        found = path / (options.get("subfolder") or "") / file_name
        if not found.is_file():
            raise ModelNotFoundError(f"The folder {path} has no file {file_name}.")
        return found
    name = os.fspath(source)
    if not HUB_ID.fullmatch(name) or name.startswith("."):
        raise ModelNotFoundError(f"{name} is no file or folder here, and no hub id of the form owner/name.")
    return _fetch(name, file_name, options)


def _fetch(name: str, file_name: str, options: dict[str, Any]) -> Path:
    try:
        from huggingface_hub import hf_hub_download
    except ImportError as error:
        raise MissingExtraError("huggingface_hub", "hub", f"Reading {file_name} of the hub's {name}") from error
    try:
        return Path(hf_hub_download(name, file_name, **options))
    except (OSError, ValueError) as error:  # its errors for missing files, no network and bad names are these
        raise ModelNotFoundError(f"{file_name} of {name} is neither here nor found on the hub: {error}") from error
