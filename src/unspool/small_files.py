"""Small files: read within bounds, written whole or not at all. JSON is always an object here."""

from __future__ import annotations

import json
import os
import secrets
import stat
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from unspool.errors import LoadError, ModelNotFoundError, UnspoolError

MAX_SETTINGS_BYTES = 16 << 20  # of a file that holds settings, a model's or a chat's
_KINDS = {stat.S_IFIFO: "pipe", stat.S_IFCHR: "device", stat.S_IFBLK: "device", stat.S_IFDIR: "folder"}


def open_regular(path: Path) -> BinaryIO:
    """Open a file to read; a pipe, a device or a folder is refused at once, where reading one might never end."""
    try:
        # Without O_NONBLOCK, opening a pipe waits for someone to write.
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
    return parse_json_object(
        read_bytes(path, max_bytes), str(path), is_strict=is_strict, allows_infinity=allows_infinity
    )


def parse_json_object(
    data: bytes, where: str, *, is_strict: bool = True, allows_infinity: bool = False
) -> dict[str, Any]:
    """A JSON object from bytes; `where` names it in errors.

    What is strict refuses NaN, numbers without end unless it `allows_infinity`, and a key given twice.
    """
    refuse = _refuse_nan if allows_infinity else _refuse_constant
    hooks: dict[str, Any] = {"parse_constant": refuse, "object_pairs_hook": _refuse_repeats}
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
    """Write a text file whole or not at all: beside it first, then moved there."""
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(6)}.part")
    try:
        with unfinished.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a number that JSON or a model knows")


def _refuse_nan(constant: str) -> float:
    return float(constant) if constant != "NaN" else _refuse_constant(constant)


def _refuse_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"the key {key!r} occurs twice")
        result[key] = value
    return result
