"""Where a file of settings lies: a folder, a path, or the hub."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
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


def read_push_options(given: Mapping[str, Any], *, is_pushed: bool, caller: str) -> dict[str, Any]:
    """The options of an upload; raises for unknown ones, and for any where nothing is uploaded."""
    unknown = [name for name in given if name not in PUSH_OPTIONS]
    if unknown or (given and not is_pushed):
        name = (unknown or list(given))[0]
        reason = "is not known" if unknown else "is for the hub; add push_to_hub=True"
        raise SettingError(f"{caller}: {name!r:.80} {reason}")
    return dict(given)


def push_saved(folder: str | os.PathLike[str], names: Sequence[str], options: Mapping[str, Any]) -> Any:
    """Upload files that were saved into a folder, to `repo_id` or the repository that the folder is called like."""
    path = Path(folder)
    own = str(folder) if HUB_ID.fullmatch(str(folder)) else path.name
    return push_files([path / name for name in names], str(options.get("repo_id") or own), options)


def push_files(paths: Sequence[Path], repo_id: str, options: Mapping[str, Any]) -> Any:
    """Upload files to the top of a hub repository in one commit, and return what the hub's client says of it.

    The repository is created if there is none (through `huggingface_hub`).
    """
    names = " and ".join(path.name for path in paths)
    try:
        from huggingface_hub import CommitOperationAdd, HfApi
    except ImportError as error:
        raise MissingExtraError("huggingface_hub", "hub", f"Pushing {names} to the hub") from error
    if not HUB_ID.fullmatch(repo_id) or repo_id.startswith("."):
        raise SettingError(f"{repo_id!r:.120} is no hub id of the form owner/name; pass repo_id='owner/name'")
    api = HfApi(token=options.get("token"))
    try:
        place = api.create_repo(repo_id, exist_ok=True, private=options.get("private")).repo_id
        return api.create_commit(
            place,
            [CommitOperationAdd(path.name, path) for path in paths],
            commit_message=options.get("commit_message") or f"Upload {names}",
            revision=options.get("revision"),
            create_pr=options.get("create_pr"),
        )
    except Exception as error:  # as above
        raise InputError(f"{names} was written, and not pushed to the hub's {repo_id}: {error}") from error
