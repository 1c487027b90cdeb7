"""Text from outside: standard input and files, bounded and checked before anything else sees it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import BinaryIO, cast

from unspool.errors import InputError

LARGEST_TEXT = 16 << 20  # bytes
LONGEST_LINE = 1 << 20
MOST_PROMPTS = 256


def read_stdin(purpose: str) -> str:
    """All of standard input, without the newline that ends it."""
    stream = open_stdin(purpose)
    return decode_text(_read_bounded(stream, "standard input"), "standard input").removesuffix("\n").removesuffix("\r")


def open_stdin(purpose: str) -> BinaryIO:
    """Standard input as bytes, so that we raise our own error if it is not text."""
    if sys.stdin is None or sys.stdin.closed:
        raise InputError(f"{purpose} is read from standard input, which is closed")
    return cast(BinaryIO, sys.stdin.buffer)


def read_prompts(path: str) -> list[str]:
    """The prompts of a file, one per line; empty lines are skipped."""
    try:
        with Path(path).expanduser().open("rb") as file:
            text = decode_text(_read_bounded(file, path), path)
    except OSError as error:
        raise InputError(f"the prompts in {path!r} can't be read: {error.strerror or error}") from error
    prompts = [line.removesuffix("\r") for line in text.split("\n") if line.strip()]
    if not prompts:
        raise InputError(f"{path!r} has no prompts: it should hold one per line")
    if len(prompts) > MOST_PROMPTS:
        raise InputError(f"{path!r} has {len(prompts)} prompts; at most {MOST_PROMPTS} are run at once. Split the file")
    return prompts


def check_text(text: str, what: str) -> str:
    """The text; raises if it is too long or was not typed as UTF-8."""
    if len(text) > LARGEST_TEXT:
        raise InputError(f"{what} has {len(text)} characters; at most {LARGEST_TEXT} are read")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{what} is not UTF-8 text") from error
    return text


def decode_text(data: bytes, what: str) -> str:
    """Bytes as text."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{what} is not UTF-8 text (byte {error.start} can't be read)") from error


def _read_bounded(stream: BinaryIO, what: str) -> bytes:
    data = stream.read(LARGEST_TEXT + 1)
    if len(data) > LARGEST_TEXT:
        raise InputError(f"{what} has more than {LARGEST_TEXT} bytes, the most that are read")
    return data
