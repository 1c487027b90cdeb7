"""Small files: read within bounds, written atomically. JSON is always an object here."""

from __future__ import annotations

import json
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from unspool.errors import InputError, LoadError, ModelNotFoundError, ResourceError, UnspoolError, excerpt

MAX_SETTINGS_BYTES = 16 << 20  # of a file that holds settings, a model's or a chat's
MAX_NESTING = 100  # levels of lists and objects: what copies, compares or prints a value calls itself for each
_KINDS = {stat.S_IFIFO: "pipe", stat.S_IFCHR: "device", stat.S_IFBLK: "device", stat.S_IFDIR: "folder"}


def open_regular(path: Path) -> BinaryIO:
    """Open a file to read; a pipe, a device or a folder is refused at once, because reading one might never end."""
    try:
        # Without O_NONBLOCK, opening a pipe waits for a writer.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except FileNotFoundError:
        raise ModelNotFoundError(f"{path} does not exist") from None
    except OSError as error:
        raise LoadError(f"{path} can't be read: {error.strerror or error}") from error
    kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
    if kind != stat.S_IFREG:
        os.close(descriptor)
        raise LoadError(f"{path} can't be read: it is a {_KINDS.get(kind, 'special file')}, not a regular file")
    return os.fdopen(descriptor, "rb")


def read_bytes(path: Path, max_bytes: int) -> bytes:
    """The content of a file of at most `max_bytes` bytes."""
    try:
        with open_regular(path) as file:
            data = file.read(max_bytes + 1)
    except UnspoolError:
        raise
    except OSError as error:
        raise LoadError(f"{path} can't be read: {error.strerror or error}") from error
    if len(data) > max_bytes:
        raise LoadError(f"{path} is larger than {max_bytes} bytes, too large for a file of this kind")
    return data


def read_text(path: Path, max_bytes: int) -> str:
    """The UTF-8 text in a file of at most `max_bytes` bytes."""
    try:
        return read_bytes(path, max_bytes).decode("utf-8")
    except UnicodeDecodeError as error:
        raise LoadError(f"{path} is not UTF-8 text: {error}") from error


def read_json_object(
    path: Path, max_bytes: int = MAX_SETTINGS_BYTES, *, is_strict: bool = True, allows_infinity: bool = False
) -> dict[str, Any]:
    """The JSON object in a file of at most `max_bytes` bytes."""
    data = read_bytes(path, max_bytes)
    value = parse_json_object(data, str(path), is_strict=is_strict, allows_infinity=allows_infinity)
    if _nests_deeper(value, MAX_NESTING):
        raise LoadError(f"{path} holds JSON that nests too deeply: lists and objects may be {MAX_NESTING} levels deep")
    return value


def parse_json_object(
    data: bytes,
    where: str,
    *,
    is_strict: bool = True,
    allows_infinity: bool = False,
    hook: Callable[[list[tuple[str, Any]]], dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """A JSON object from bytes; `where` names it in errors.

    With `is_strict`, NaN, infinities (unless `allows_infinity`) and repeated keys are refused; a caller's `hook` that
    makes objects of pairs replaces the check of keys.
    """
    refuse = _refuse_nan if allows_infinity else _refuse_constant
    hooks: dict[str, Any] = {"parse_constant": refuse, "object_pairs_hook": hook or _refuse_repeats}
    try:
        value = json.loads(data.decode("utf-8-sig"), **(hooks if is_strict else {}))
    except RecursionError:
        raise LoadError(f"{where} is not valid JSON: it nests too deeply") from None
    except ValueError as error:  # bad UTF-8, bad JSON, absurdly long numbers, and the two refusals below
        raise LoadError(f"{where} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise LoadError(f"{where} holds a JSON {type(value).__name__}; an object was expected")
    return value


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically: to a temporary file beside it, which is then moved there."""
    try:
        data = text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(f"{str(path)[:300]!r} can't be written: the text holds half a character ({error})") from error
    with writing_beside(path) as unfinished, unfinished.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def writing_beside(path: Path) -> Iterator[Path]:
    """A temporary name beside a file: what is written there is moved to the file on success, or removed.

    Raises `ResourceError` if the folder is missing or read-only, or the disk is full.
    """
    unfinished = path.with_name(f".{path.name[:100]}.{secrets.token_hex(6)}.part")
    try:
        try:
            yield unfinished
            unfinished.replace(path)
        finally:
            with suppress(OSError):
                unfinished.unlink(missing_ok=True)
    except (ResourceError, LoadError):
        raise
    except (OSError, ValueError) as error:  # a name with a null character in it is a ValueError
        raise ResourceError(explain_unwritten(path, error)) from error


def make_folder(path: Path) -> None:
    """Make a folder and its parents; nothing if it exists."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise ResourceError(explain_unwritten(path, error)) from error


def explain_unwritten(path: Path, error: Exception) -> str:
    """Why a file or folder can't be written."""
    reason = getattr(error, "strerror", None) or str(error)[:200]
    hint = "" if path.parent.is_dir() else f": there is no folder {str(path.parent)[:300]!r}"
    return f"{str(path)[:300]!r} can't be written: {reason}{hint}. Give another place, or make room there"


def _nests_deeper(value: Any, levels: int) -> bool:
    parts = [value]
    for _ in range(levels):
        inner = (one for part in parts for one in (part.values() if isinstance(part, dict) else part))
        parts = [one for one in inner if isinstance(one, dict | list)]
        if not parts:
            return False
    return True


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a number that JSON or a model knows")


def _refuse_nan(constant: str) -> float:
    return float(constant) if constant != "NaN" else _refuse_constant(constant)


def _refuse_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"the key {excerpt(key)} occurs twice")
        result[key] = value
    return result
