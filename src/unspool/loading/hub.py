"""Models from the Hugging Face hub, through huggingface_hub and its cache: data only, no code, no pickles."""

from __future__ import annotations

import errno
import os
import re
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from unspool.errors import LoadError, MissingExtraError, ModelNotFoundError, UnspoolError

ALLOWED_PATTERNS = ["*.json", "*.safetensors", "tokenizer*", "*.jinja", "*.model"]
# "tokenizer*" alone would let code through; folders within a repository hold the same weights otherwise.
PICKLES_AND_CODE = ["*.py", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle"]
PICKLED_PATTERNS = ["pytorch_model*.bin", "pytorch_model.bin.index.json"]
IGNORED_PATTERNS = [*PICKLES_AND_CODE, "*/*", "consolidated*"]

_PART = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_HUB_NAME = re.compile(rf"({_PART}/{_PART})(?::([A-Za-z0-9][A-Za-z0-9._/-]{{0,250}}\.gguf))?")
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,250}")


@dataclass(frozen=True, slots=True)
class HubOptions:
    """How the hub's client fetches: its own arguments, where a caller gave them."""

    cache_dir: str | Path | None = None
    token: str | bool | None = None
    force_download: bool = False

    def as_arguments(self) -> dict[str, Any]:
        """The arguments that differ from the client's defaults."""
        given = {"cache_dir": self.cache_dir, "token": self.token, "force_download": self.force_download or None}
        return {name: value for name, value in given.items() if value is not None}


NO_OPTIONS = HubOptions()


def parse_hub_name(name: str) -> tuple[str, str | None] | None:
    """Split `owner/name` or `owner/name:file.gguf`; None if the text is neither."""
    match = _HUB_NAME.fullmatch(name)
    if match is None or ".." in name or "--" in match[1]:
        return None
    return match[1], match[2]


def fetch(
    repo_id: str,
    revision: str | None = None,
    filename: str | None = None,
    offline: bool | None = None,
    options: HubOptions = NO_OPTIONS,
    *,
    has_weights: bool = True,
) -> Path:
    """Download a model, or find it in the cache: its folder, or the one GGUF file asked for.

    `offline=None` follows HF_HUB_OFFLINE; True looks in the cache only. Without `has_weights` only small files come:
    configs and tokenizer.
    """
    name = repo_id if filename is None else f"{repo_id}:{filename}"
    if parse_hub_name(name) != (repo_id, filename):
        raise LoadError(f"{name[:300]!r} is not a hub id: those look like owner/name or owner/name:file.gguf")
    if revision is not None and (not _REVISION.fullmatch(revision) or ".." in revision):
        raise LoadError(f"{revision[:300]!r} is not a revision: those are branches, tags or commit hashes")
    try:
        import huggingface_hub
    except ImportError:
        purpose = f"fetching {name!r} from the Hugging Face hub (no folder of that name is here)"
        raise MissingExtraError("huggingface_hub", "hub", purpose) from None
    is_offline = _is_offline() if offline is None else offline
    how: dict[str, Any] = {"revision": revision, "local_files_only": is_offline, **options.as_arguments()}
    try:
        if filename is not None:
            return Path(huggingface_hub.hf_hub_download(repo_id, filename, **how))
        folder = huggingface_hub.snapshot_download(
            repo_id,
            allow_patterns=ALLOWED_PATTERNS,
            ignore_patterns=IGNORED_PATTERNS if has_weights else [*IGNORED_PATTERNS, "*.safetensors"],
            **how,
        )
        if has_weights and not is_offline and not any(Path(folder).glob("*.safetensors")):
            files = huggingface_hub.list_repo_files(repo_id, revision=revision)
            if not any(fnmatch(file, PICKLED_PATTERNS[0]) for file in files) or any(f.endswith(".gguf") for f in files):
                _refuse_without_weights(files, repo_id)
            # Models that exist only as pickles: a confined process rewrites them (`pickled`).
            folder = huggingface_hub.snapshot_download(
                repo_id,
                allow_patterns=[*ALLOWED_PATTERNS, *PICKLED_PATTERNS],
                ignore_patterns=[pattern for pattern in IGNORED_PATTERNS if pattern != "*.bin"],
                **how,
            )
        return Path(folder)
    except UnspoolError:
        raise
    except Exception as error:  # the library's network errors have no common root across its versions
        raise _translate(error, name, revision, is_offline) from error


def _is_offline() -> bool:
    # huggingface_hub reads the variable once, when it is imported; a program may set it later.
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def _refuse_without_weights(files: list[str], repo_id: str) -> None:
    ggufs = sorted(file for file in files if file.endswith(".gguf"))
    if ggufs:
        shown = ", ".join(f"{repo_id}:{file}" for file in ggufs[:8])
        raise LoadError(f"{repo_id!r} holds GGUF files: say which one you want, as in {shown}")
    raise LoadError(
        f"{repo_id!r} on the hub holds neither safetensors nor GGUF files nor a pytorch_model.bin at its "
        "top (other pickles are never downloaded). Use a repository that has them"
    )


def _translate(error: Exception, name: str, revision: str | None, is_offline: bool) -> LoadError:
    from huggingface_hub import errors

    at = f" at revision {revision!r}" if revision else ""
    if isinstance(error, errors.GatedRepoError):
        return LoadError(
            f"{name!r} on the hub is gated: accept its conditions on its page there, "
            "then log in on this machine with: hf auth login"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return ModelNotFoundError(
            f"no model {name!r}: neither a folder here nor a repository on the hub that you may see. "
            "Check the spelling; for a private one, log in with: hf auth login"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return ModelNotFoundError(f"{name!r} on the hub has no revision {revision!r}")
    is_missing_here = isinstance(error, errors.LocalEntryNotFoundError) or "Incomplete" in type(error).__name__
    if is_missing_here and is_offline:
        return ModelNotFoundError(
            f"{name!r}{at} is not, or not wholly, in the local cache, and offline mode is on. "
            f"Fetch it with a connection first: HF_HUB_OFFLINE=0 unspool pull {name}"
        )
    if is_missing_here:
        reason = (str(error).splitlines() or [type(error).__name__])[0].removeprefix("Got: ")  # the rest is advice
        return LoadError(f"{name!r}{at} is not in the local cache and the hub can't be reached: {reason}")
    if isinstance(error, errors.EntryNotFoundError):
        return ModelNotFoundError(f"the repository of {name!r}{at} on the hub has no such file")
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return LoadError(f"the disk is too full to download {name!r}: make room, or set HF_HOME to another disk")
    return LoadError(f"{name!r}{at} could not be fetched from the hub: {type(error).__name__}: {error}")
