"""Reading and writing the small JSON files that hold settings."""

from __future__ import annotations

import json
import os
import re
import secrets
from pathlib import Path
from typing import Any

from unspool.errors import LoadError, MissingExtraError, ModelNotFoundError

LARGEST_FILE = 16 * 2**20
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


def write_text(path: Path, text: str) -> None:
    """Write a text file whole or not at all."""
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(6)}.part")
    try:
        with unfinished.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds one object; anything else is a LoadError."""
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST_FILE + 1)
        if len(data) > LARGEST_FILE:
            raise LoadError(f"{path} is larger than {LARGEST_FILE} bytes, the most that a settings file has.")
        content = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or a number of thousands of digits
        raise LoadError(f"{path} is not a valid JSON file: {error}") from error
    if not isinstance(content, dict):
        raise LoadError(f"{path} holds a {type(content).__name__}, where an object of settings is expected.")
    return content


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
