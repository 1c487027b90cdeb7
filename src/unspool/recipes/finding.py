"""Finding a recipe's folder: on this disk, among those that come with unspool, or on the hub at one commit."""

from __future__ import annotations

import re
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path

from unspool.errors import (
    LoadError,
    MissingExtraError,
    ModelNotFoundError,
    SettingError,
    UnspoolError,
    excerpt,
    spell_controls,
)
from unspool.loading.hub import parse_hub_name
from unspool.recipes.snapshot import Snapshot, show_name, take_snapshot

SHIPPED = Path(__file__).parent / "shipped"
FILE = "generate.py"
_COMMIT = re.compile("[0-9a-f]{40}")
_PATTERNS = ["custom_generate/*", FILE, "requirements.txt", "README.md"]
_LEFT_OUT = ["*__pycache__*", "*.pyc", "*.pyo"]  # what Python makes of the files beside them
_LONGEST_LINE = 100
_MOST_LISTED = 8  # files that an error lists


@dataclass(frozen=True, slots=True)
class RecipeFiles:
    """The files of a recipe, as they were when it was found."""

    name: str
    folder: Path
    script: Path  # generate.py
    snapshot: Snapshot
    is_shipped: bool = False

    @property
    def requirements(self) -> Path:
        """The list of packages: beside the script, or at the folder's top."""
        beside = self.script.parent / "requirements.txt"
        return beside if beside.is_file() else self.folder / "requirements.txt"

    @property
    def source(self) -> str:
        """The script's text."""
        return self.snapshot.files[self.script.relative_to(self.folder).as_posix()].source or ""


def list_shipped() -> list[str]:
    """The names of the recipes that come with unspool."""
    return sorted(path.name for path in SHIPPED.iterdir() if (path / "custom_generate" / FILE).is_file())


def find_recipe(name: str | PathLike[str], revision: str | None = None) -> RecipeFiles:
    """The recipe of a folder, a shipped one's name, or a hub id with the commit that it is pinned to."""
    text = fspath(name)
    path = Path(text).expanduser()
    if not text or "\0" in text:
        raise ModelNotFoundError(
            "a recipe is named by a folder, a shipped recipe's name or a hub id; the name is empty"
        )
    if path.is_dir():
        return _open(path, text)
    if text in list_shipped():
        return _open(SHIPPED / text, text, is_shipped=True)
    if parse_hub_name(text) is None or text.endswith(".gguf"):
        raise ModelNotFoundError(
            f"there is no recipe {excerpt(text)}: neither a folder, nor a hub id (owner/name), nor one of those that "
            f"come with unspool ({', '.join(list_shipped())})"
        )
    return _open(_fetch(text, revision), text)


def _fetch(name: str, revision: str | None) -> Path:
    """The recipe's folder at one commit. Branches and tags move, so code is pinned to what was looked at."""
    try:
        import huggingface_hub
    except ImportError:
        raise MissingExtraError("huggingface_hub", "hub", f"fetching the recipe {name!r} from the hub") from None
    try:
        if revision is None or not _COMMIT.fullmatch(revision):
            commit = huggingface_hub.HfApi().model_info(name, revision=revision).sha
            raise SettingError(
                f"the recipe {name!r} is code from the hub, which is run at one commit only: read "
                f"https://huggingface.co/{name}/tree/{commit} and pass revision='{commit}'"
            )
        folder = huggingface_hub.snapshot_download(
            name, revision=revision, allow_patterns=_PATTERNS, ignore_patterns=_LEFT_OUT
        )
        return Path(folder)
    except UnspoolError:
        raise
    except Exception as error:  # the library's network errors have no common root across its versions
        raise ModelNotFoundError(f"the recipe {name!r} could not be fetched from the hub: {error}") from error


def _open(folder: Path, name: str, *, is_shipped: bool = False) -> RecipeFiles:
    places = [folder / "custom_generate" / FILE, folder / FILE]
    script = next((place for place in places if place.is_file()), None)
    if script is None:
        raise LoadError(f"{folder} is no recipe: it has neither custom_generate/{FILE} nor {FILE}")
    snapshot = take_snapshot(folder, is_installed=is_shipped)
    if script.relative_to(folder).as_posix() not in snapshot.files:
        raise LoadError(f"{script} was removed while it was read")
    return RecipeFiles(name, folder, script, snapshot, is_shipped)


def describe_code(recipe: RecipeFiles, most_lines: int = 12) -> str:
    """What would run, in few words: the script and its hash, the files beside it, and the script's first lines."""
    name = recipe.script.relative_to(recipe.folder).as_posix()
    held = recipe.snapshot.files
    others = [f"{show_name(other)[:200]} ({_shorten(held[other].digest)})" for other in sorted(held) if other != name]
    beside = ""
    if others:
        left = f" and {len(others) - _MOST_LISTED} more" if len(others) > _MOST_LISTED else ""
        beside = f"; with it come {', '.join(others[:_MOST_LISTED])}{left}"
    return f"{recipe.script} (sha256 {_shorten(held[name].digest)}{beside}):\n{_show_source(recipe.source, most_lines)}"


def list_code(recipe: RecipeFiles) -> str:
    """What would run, whole: every file with its SHA-256, and the script's first lines."""
    files = "\n".join(recipe.snapshot.describe())
    return f"{recipe.script}:\n{_show_source(recipe.source, 12)}\nIts files, by SHA-256:\n{files}"


def _shorten(digest: str | None) -> str:
    return "not hashed" if digest is None else f"{digest[:16]}…"


def _show_source(source: str, most_lines: int) -> str:
    lines = source.splitlines()
    shown = [f"{line[:_LONGEST_LINE]}{'…' if len(line) > _LONGEST_LINE else ''}" for line in lines[:most_lines]]
    rest = "" if len(lines) <= most_lines else f"\n    … ({len(lines)} lines)"
    return "\n".join(f"    {spell_controls(line)}" for line in shown) + rest
