"""Finding a recipe's folder: on this disk, among those that come with unspool, or on the hub at one commit."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path

from unspool.errors import LoadError, MissingExtraError, ModelNotFoundError, SettingError, UnspoolError, excerpt
from unspool.loading.hub import parse_hub_name
from unspool.small_files import read_text

SHIPPED = Path(__file__).parent / "shipped"
FILE = "generate.py"
_MOST_BYTES = 1 << 20
_COMMIT = re.compile("[0-9a-f]{40}")
_PATTERNS = ["custom_generate/*", FILE, "requirements.txt", "README.md"]


@dataclass(frozen=True, slots=True)
class RecipeFiles:
    """The files of a recipe."""

    name: str
    folder: Path
    script: Path  # generate.py
    is_shipped: bool = False

    @property
    def requirements(self) -> Path:
        """The list of packages: beside the script, or at the folder's top."""
        beside = self.script.parent / "requirements.txt"
        return beside if beside.is_file() else self.folder / "requirements.txt"

    def read_source(self) -> str:
        """The script's text."""
        return read_text(self.script, _MOST_BYTES)


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
        return Path(huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=_PATTERNS))
    except UnspoolError:
        raise
    except Exception as error:  # the library's network errors have no common root across its versions
        raise ModelNotFoundError(f"the recipe {name!r} could not be fetched from the hub: {error}") from error


def _open(folder: Path, name: str, *, is_shipped: bool = False) -> RecipeFiles:
    places = [folder / "custom_generate" / FILE, folder / FILE]
    script = next((place for place in places if place.is_file()), None)
    if script is None:
        raise LoadError(f"{folder} is no recipe: it has neither custom_generate/{FILE} nor {FILE}")
    within = folder.resolve()
    for file in (script, script.parent / "requirements.txt", folder / "requirements.txt"):
        is_cached = within.parent.name == "snapshots"  # the hub's cache is made of links into its own store
        root = within.parent.parent if is_cached else within
        if file.exists() and not file.resolve().is_relative_to(root):
            raise LoadError(f"{file} leads out of the recipe's folder; a recipe lies within its folder")
    return RecipeFiles(name, folder, script, is_shipped)


def describe_code(recipe: RecipeFiles, most_lines: int = 12) -> str:
    """What would run: the file, its hash, and its first lines."""
    source = recipe.read_source()
    lines = source.splitlines()
    shown = "\n".join(f"    {line[:100]}" for line in lines[:most_lines])
    rest = "" if len(lines) <= most_lines else f"\n    … ({len(lines)} lines)"
    digest = hashlib.sha256(source.encode()).hexdigest()[:16]
    return f"{recipe.script} (sha256 {digest}…):\n{shown}{rest}"
