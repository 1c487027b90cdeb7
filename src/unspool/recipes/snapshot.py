"""A recipe's files as they were at one moment: what is shown, hashed and run are the same bytes."""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from unspool.errors import LoadError, UnspoolError, excerpt, spell_controls
from unspool.small_files import open_regular

MOST_FILES: Final = 1000
MOST_CODE_BYTES: Final = 1 << 20  # of a file
_MOST_ALL_CODE: Final = 16 << 20
_MOST_DATA_BYTES: Final = 1 << 28  # of a file that is hashed: a larger one is named with its size
_MOST_ALL_DATA: Final = 1 << 30
_CHUNK: Final = 1 << 20
_SKIPPED: Final = (".git",)  # of folders: what git keeps is no part of what it has checked out
_CACHE: Final = "__pycache__"
_COMPILED: Final = (
    *(suffix for suffix in importlib.machinery.all_suffixes() if suffix != ".py"),
    *(".pyc", ".pyo", ".pyd", ".so", ".dll", ".dylib", ".egg", ".whl", ".pyz", ".pth"),
)
_NUMBERED_LIBRARY: Final = re.compile(r"\.so(\.\d{1,9}){1,4}\Z")  # libhelper.so.1
_MACHINE_CODE: Final = (
    importlib.util.MAGIC_NUMBER,
    *(b"\x7fELF", b"MZ\x90\x00", b"\xcf\xfa\xed\xfe", b"\xce\xfa\xed\xfe", b"\xca\xfe\xba\xbe"),
)


@dataclass(frozen=True, slots=True)
class HeldFile:
    """A file of a recipe."""

    size: int
    digest: str | None  # its SHA-256; None for data that is too large to hash
    source: str | None  # of Python code


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All files of a recipe's folder, by their names within it."""

    folder: Path
    files: Mapping[str, HeldFile]

    @property
    def digest(self) -> str:
        """A hash of all names, sizes and contents."""
        whole = hashlib.sha256()
        for name, file in sorted(self.files.items()):
            whole.update(f"{name!r} {file.size} {file.digest}\n".encode())
        return whole.hexdigest()

    def describe(self) -> list[str]:
        """A line for each file: its hash, its size and its name."""
        return [
            f"{file.digest or 'not hashed: too large'}  {file.size:>9,} bytes  {show_name(name)}"
            for name, file in sorted(self.files.items())
        ]


def show_name(name: str) -> str:
    """A file's name on one line, safe to print."""
    return spell_controls(name).replace("\n", "\\n").replace("\t", "\\t")


def take_snapshot(folder: Path, *, is_installed: bool = False) -> Snapshot:
    """Read every file of a recipe once; raises for compiled code, for files that lead out of it, and if it is no folder
    that somebody could look through.

    What an installer has compiled beside the files of one that `is_installed` is left out.
    """
    files, num_code, num_data = dict[str, HeldFile](), 0, 0
    roots = _list_roots(folder)
    for path in _walk(folder, (*_SKIPPED, _CACHE) if is_installed else _SKIPPED):
        name = path.relative_to(folder).as_posix()
        if not any(path.resolve().is_relative_to(root) for root in roots):
            raise LoadError(f"{path} leads out of the recipe's folder; a recipe lies within its folder")
        _refuse_compiled(path, name)
        held = _read(path, _MOST_ALL_DATA - num_data)
        files[name] = held
        num_code += 0 if held.source is None else held.size
        num_data += 0 if held.digest is None else held.size
        if num_code > _MOST_ALL_CODE:
            raise LoadError(
                f"{folder} has more than {_MOST_ALL_CODE >> 20} MiB of code, and all that a recipe has is listed "
                "before it runs; give it a folder of its own"
            )
    return Snapshot(folder, files)


def _list_roots(folder: Path) -> list[Path]:
    """Where files may lie: in the folder, and in the store of the hub's cache, which its folders are links into."""
    within = folder.resolve()
    store = within.parent.parent / "blobs"
    return [within, store] if within.parent.name == "snapshots" and store.is_dir() else [within]


def _walk(folder: Path, skipped: Collection[str]) -> Iterator[Path]:
    num_found = 0

    def fail(error: OSError) -> None:
        raise LoadError(f"{folder} can't be read: {error.strerror or error}") from error

    for place, folders, names in os.walk(folder, onerror=fail):
        folders[:] = sorted(one for one in folders if one not in skipped)
        num_found += len(folders) + len(names)
        if num_found > MOST_FILES:
            raise LoadError(
                f"{folder} has more than {MOST_FILES} files and folders, and all that a recipe has is listed before it "
                "runs; give it a folder of its own"
            )
        for one in folders:
            if Path(place, one).is_symlink():
                raise LoadError(f"{Path(place, one)} is a link to a folder; a recipe's folders lie within it")
        yield from (Path(place, one) for one in sorted(names))


def _refuse_compiled(path: Path, name: str) -> None:
    last = path.name.lower()
    if last.endswith(_COMPILED) or _NUMBERED_LIBRARY.search(last) or _CACHE in name.split("/"):
        raise _make_refusal(path)


def _make_refusal(path: Path) -> LoadError:
    return LoadError(
        f"{excerpt(str(path), 300)} is compiled code, which nobody can read, and a recipe is Python source; delete it, "
        "or install it as a package and name that in requirements.txt"
    )


def _read(path: Path, left: int) -> HeldFile:
    try:
        with open_regular(path) as file:
            if path.suffix != ".py":
                return _hash(file, path, min(left, _MOST_DATA_BYTES))
            data = file.read(MOST_CODE_BYTES + 1)
    except UnspoolError:
        raise
    except OSError as error:
        raise LoadError(f"{path} can't be read: {error.strerror or error}") from error
    if len(data) > MOST_CODE_BYTES:
        raise LoadError(f"{path} is larger than {MOST_CODE_BYTES} bytes, too large for a recipe's code")
    try:
        source = data.decode("utf-8-sig")  # as it is shown: a line that names another encoding changes nothing
    except UnicodeDecodeError as error:
        raise LoadError(f"{path} is not UTF-8 text: {error}") from error
    return HeldFile(len(data), hashlib.sha256(data).hexdigest(), source)


def _hash(file: BinaryIO, path: Path, most: int) -> HeldFile:
    size = os.fstat(file.fileno()).st_size
    digest, left = hashlib.sha256(), most
    while chunk := file.read(_CHUNK):
        if left == most and chunk.startswith(_MACHINE_CODE):
            raise _make_refusal(path)
        left -= len(chunk)
        if size > most or left < 0:
            return HeldFile(size, None, None)
        digest.update(chunk)
    return HeldFile(most - left, digest.hexdigest(), None)
