"""One line of a batch: a request in OpenAI's batch form, or a plain object with a prompt or messages."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

from unspool.errors import InputError, excerpt

MAX_LINE_BYTES: Final = 16 << 20
_LONGEST_ID: Final = 512
_OPENAI: Final = ("custom_id", "method", "url", "body")
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
URLS: Final = (CHAT, COMPLETIONS, RESPONSES)


class BadLineError(InputError):
    """A line that can't be read; the batch goes on without it."""

    custom_id: str | None = None  # of the line, if that much could be read


@dataclass(frozen=True)
class Line:
    """A request, and what its answer is written with."""

    number: int  # of the line, from 1
    url: str  # the route that its body is for
    body: dict[str, Any]
    custom_id: str | None = None
    is_plain: bool = False  # an object of ours; else OpenAI's form


def parse_line(number: int, text: bytes) -> Line:
    """The request of a line of a .jsonl file."""
    if len(text) > MAX_LINE_BYTES:
        raise BadLineError(f"the line has {len(text)} bytes; at most {MAX_LINE_BYTES} are read")
    try:
        value = load_json(text)
    except ValueError as error:
        raise BadLineError(f"the line is not valid JSON: {error}") from error
    return read_row(number, value)


def load_json(text: str | bytes) -> Any:
    """The value of a text of JSON; a ValueError says why there is none, or none that can be written again."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
        json.dumps(value, ensure_ascii=False).encode()  # a half of a character, such as "\\ud800", is refused here
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    return value


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number")


def read_row(number: int, row: Any) -> Line:
    """The request of a row, whatever file it comes from."""
    if not isinstance(row, dict):
        raise BadLineError(f"a line is a JSON object, not {excerpt(row)}")
    body = dict(row)
    is_openai = "body" in row or "url" in row
    custom_id = _check_id(body.get("custom_id") if is_openai else body.pop("custom_id", body.pop("id", None)))
    try:
        return _read_openai(number, row, custom_id) if is_openai else _read_plain(number, body, custom_id)
    except BadLineError as error:
        error.custom_id = custom_id
        raise


def _read_plain(number: int, body: dict[str, Any], custom_id: str | None) -> Line:
    given = [name for name in ("prompt", "messages") if body.get(name) is not None]
    if len(given) != 1:
        raise BadLineError(
            "a line has a `prompt` or `messages`, beside them settings and an `id`; or OpenAI's form with `body`"
        )
    return Line(number, CHAT if given == ["messages"] else COMPLETIONS, body, custom_id, is_plain=True)


def _read_openai(number: int, row: dict[str, Any], custom_id: str | None) -> Line:
    unknown = [name for name in row if name not in _OPENAI]
    if unknown:
        raise BadLineError(f"a line in OpenAI's form has {', '.join(_OPENAI)}, not {excerpt(unknown[0], 64)}")
    if row.get("method", "POST") != "POST":
        raise BadLineError(f"`method` is POST, not {excerpt(row['method'])}")
    if row.get("url") not in URLS:
        raise BadLineError(f"`url` is {', '.join(URLS)}, not {excerpt(row.get('url'))}")
    if not isinstance(row.get("body"), dict):
        raise BadLineError("`body` is the object that the route takes")
    if custom_id is None:
        raise BadLineError("a line in OpenAI's form needs a `custom_id`")
    return Line(number, row["url"], row["body"], custom_id)


def _check_id(value: Any) -> str | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int) or not 0 < len(str(value)) <= _LONGEST_ID:
        raise BadLineError(f"an id is a text of 1 to {_LONGEST_ID} characters, not {excerpt(value)}")
    return str(value)
