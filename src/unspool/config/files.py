"""Where a file of settings lies: a folder, a path, or the hub."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from unspool.errors import InputError, MissingExtraError, ModelNotFoundError, SettingError

HUB_ID = re.compile(r"[\w.-]{1,96}(/[\w.-]{1,96})?")
PUSH_OPTIONS = ("repo_id", "token", "private", "commit_message", "revision", "create_pr")
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
    except Exception as error:  # its errors have no common root across its versions
        raise ModelNotFoundError(f"{file_name} of {name} is neither here nor found on the hub: {error}") from error


def push_file(path: Path, repo_id: str, options: dict[str, Any]) -> None:
    """Upload a file to the top of a hub repository, which is created if there is none (through `huggingface_hub`)."""
    try:
        from huggingface_hub import HfApi
    except ImportError as error:
        raise MissingExtraError("huggingface_hub", "hub", f"Pushing {path.name} to the hub") from error
    if not HUB_ID.fullmatch(repo_id) or repo_id.startswith("."):
        raise SettingError(f"{repo_id!r:.120} is no hub id of the form owner/name; pass repo_id='owner/name'")
    api = HfApi(token=options.get("token"))
    try:
        place = api.create_repo(repo_id, exist_ok=True, private=options.get("private")).repo_id
        api.upload_file(
            path_or_fileobj=path,
            path_in_repo=path.name,
            repo_id=place,
            commit_message=options.get("commit_message") or f"Upload {path.name}",
            revision=options.get("revision"),
            create_pr=options.get("create_pr"),
        )
    except Exception as error:  # as above
        raise InputError(f"{path} was written, and not pushed to the hub's {repo_id}: {error}") from error
