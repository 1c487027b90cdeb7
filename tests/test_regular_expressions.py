"""Every regular expression in the sources takes time in proportion to what it reads."""

from __future__ import annotations

import ast
import itertools
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import unspool
from unspool.loading.package_index import _list_files

ROOT = Path(unspool.__file__).parent
SHORT = {  # read texts that are bounded by so many characters
    r"v?(?:\d+!)?(\d+(?:\.\d+)*)(.*)": 60,
    r"\{\d{3,}|[*+}]\)?[*+{]": 256,
}
MOST_SECONDS = 1.0
MANY = 4_000


def list_patterns() -> Iterator[tuple[str, str]]:
    """Every pattern that a file gives to `re`, and the way it is used (`compile` counts as all of them)."""
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or not node.args:
                continue
            if not isinstance(node.func.value, ast.Name) or node.func.value.id != "re":
                continue
            text = _join(node.args[0])
            if text is not None:
                yield text, str(path.relative_to(ROOT))


def _join(node: ast.expr) -> str | None:
    """The text of a pattern; what an f-string or a sum puts in is read as a word."""
    if isinstance(node, ast.Constant):
        return node.value.decode("latin-1") if isinstance(node.value, bytes) else str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(str(one.value) if isinstance(one, ast.Constant) else "word" for one in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        parts = (_join(node.left), _join(node.right))
        return "".join("word" if part is None else part for part in parts)
    return None


def list_pieces(pattern: str) -> list[str]:
    """Texts that the pattern may read over and over: its characters, one of each class, and its literal runs."""
    found = {*re.findall(r"[A-Za-z]{2,}|[^\\\[\](){}?*+|^$]", pattern), "a", "0", " ", "{", "(", "<", "[", "."}
    return sorted(found, key=len)[:24]


def make_texts(pattern: str, many: int) -> Iterator[str]:
    """Hostile texts: a piece many times, two in turn, one behind all others, each with an end that fits nothing."""
    pieces = list_pieces(pattern)
    for piece in pieces:
        yield piece * (many // len(piece)) + "\0\n"
        yield "".join(pieces) + piece * (many // len(piece)) + "\0\n"
    for one, other in itertools.permutations(pieces, 2):
        yield (one + other) * (many // len(one + other)) + "\0\n"
    for piece in pieces:
        whole = re.sub(r"\\.|[\\\[\](){}?*+|^$]", "", pattern)[:40]
        yield (whole + piece) * (many // len(whole + piece)) + "\0\n"


class TooSlow(Exception):  # noqa: N818 - what the alarm raises
    pass


def _ring(_: int, __: FrameType | None) -> Any:
    raise TooSlow


@pytest.mark.parametrize(("pattern", "file"), sorted(set(list_patterns())))
def test_no_text_takes_a_pattern_long(pattern: str, file: str) -> None:
    compiled = re.compile(pattern, re.IGNORECASE | re.MULTILINE if "ignorecase" in pattern else 0)
    most = SHORT.get(pattern, MANY)
    before = signal.signal(signal.SIGVTALRM, _ring)
    began = time.process_time()
    text = ""
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, 20)
        for text in make_texts(pattern, most):
            for read in (compiled.fullmatch, compiled.search):
                start = time.process_time()
                read(text)
                taken = time.process_time() - start
                assert taken < 0.05, f"{file}: {pattern!r} takes {taken:.2f} s for {text[:80]!r}… ({len(text)})"
    except TooSlow:
        pytest.fail(f"{file}: {pattern!r} takes {time.process_time() - began:.0f} s for {text[:80]!r}… ({len(text)})")
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


@pytest.mark.parametrize("piece", ["<a ", "<a href=", '<a href="', "<a>", "<a href=x", '<a href="x">', " "])
def test_hostile_pages_of_an_index_are_read_at_once(piece: str) -> None:
    began = time.process_time()
    assert not list(_list_files((piece * (1 << 20))[: 4 << 20].encode(), "text/html", "https://index/x/"))
    assert time.process_time() - began < 2
