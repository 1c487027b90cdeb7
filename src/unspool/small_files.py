"""Small files: read within bounds, written whole or not at all. JSON is always an object here."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from unspool.errors import LoadError, excerpt

MAX_SETTINGS_BYTES = 16 << 20  # of a file that holds settings, a model's or a chat's


def read_bytes(path: Path, max_bytes: int) -> bytes:
    """The content of a file of at most `max_bytes` bytes."""
    try:
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
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
    data: bytes,
    where: str,
    *,
    is_strict: bool = True,
    allows_infinity: bool = False,
    hook: Callable[[list[tuple[str, Any]]], dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """A JSON object from bytes; `where` names it in errors.

    What is strict refuses NaN, numbers without end unless it `allows_infinity`, and a key given twice, unless a `hook`
    of the caller's own makes objects of pairs.
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
            raise ValueError(f"the key {excerpt(key)} occurs twice")
        result[key] = value
    return result
