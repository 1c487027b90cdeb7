"""JSON from model folders: bounded in size, always an object, no NaN, no key twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from unspool.errors import LoadError

MAX_CONFIG_BYTES = 10 << 20


def _refuse_constant(constant: str) -> Any:
    raise ValueError(f"{constant} is not a number that JSON or a model knows")


def _refuse_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"the key {key!r} occurs twice")
        result[key] = value
    return result


def parse_json_object(data: bytes, where: str) -> dict[str, Any]:
    """A JSON object from bytes; `where` names it in errors."""
    try:
        value = json.loads(data.decode(), parse_constant=_refuse_constant, object_pairs_hook=_refuse_repeats)
    except RecursionError:
        raise LoadError(f"{where} nests too deeply to be a model's file") from None
    except ValueError as error:  # bad UTF-8, bad JSON, absurdly long numbers, and the two refusals above
        raise LoadError(f"{where} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise LoadError(f"{where} holds a JSON {type(value).__name__}; an object was expected")
    return value


def read_json_object(path: Path, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """The JSON object in a file of at most `max_bytes` bytes."""
    try:
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise LoadError(f"{path} can't be read: {error.strerror or error}") from error
    if len(data) > max_bytes:
        raise LoadError(f"{path} is larger than {max_bytes} bytes, too large for a model's file of this kind")
    return parse_json_object(data, str(path))
