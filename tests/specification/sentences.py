"""What the documents' sentences promise, read from `promises.txt`, and the tests that show it.

A line of that file is a section of a document, the promise in short words, and its tests: `folder/file::name` below
`tests/`, without `.py` and `test_`. A test that is not there yet begins with `?`: a word that it will have, or a part
of its file's name, by which it is found.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Promise:
    """What a sentence of a document promises."""

    section: str
    words: str
    tests: tuple[str, ...]
    awaited: str = ""


def _read(text: str) -> dict[str, list[Promise]]:
    """The promises by document."""
    promises: dict[str, list[Promise]] = {}
    for line in filter(None, text.splitlines()):
        if line.startswith("# "):
            listed = promises.setdefault(line[2:], [])
            continue
        section, words, tests = line.split(" | ")
        if tests.startswith("?"):
            listed.append(Promise(section, words, (), tests[1:]))
        else:
            listed.append(Promise(section, words, tuple(tests.split())))
    return promises


PROMISES = _read(Path(__file__).with_name("promises.txt").read_text(encoding="utf-8"))
