"""The screen: whatever is printed, no text from outside moves the cursor."""

from __future__ import annotations

import io
import re
import sys

import pytest

from unspool.cli import console

HOSTILE = "name\x1b]0;owned\x07\x9b2J"
CLEAN = "name\ufffd]0;owned\ufffd\ufffd2J"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def attach(monkeypatch: pytest.MonkeyPatch) -> tuple[Terminal, Terminal]:
    """Standard output and standard error as terminals. Not a fixture: pytest puts its own there before the test."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    out, err = Terminal(), Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    return out, err


def test_what_is_said_is_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = attach(monkeypatch)
    console.say(HOSTILE)
    console.say(HOSTILE, console.DIM)
    console.say_error(ValueError(HOSTILE))
    console.say_parts(console.paint(HOSTILE, console.BOLD, stream=sys.stderr), " " + HOSTILE)
    expected = (
        f"{CLEAN}\n\x1b[2m{CLEAN}\x1b[0m\n\x1b[1;31munspool: error:\x1b[0m {CLEAN}\n\x1b[1m{CLEAN}\x1b[0m {CLEAN}\n"
    )
    assert streams[1].getvalue() == expected


def test_a_bug_is_told_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = attach(monkeypatch)
    console.say_bug(RuntimeError(HOSTILE), is_debugging=True)
    assert "\x1b]" not in streams[1].getvalue()
    assert streams[1].getvalue().count(CLEAN) == 2


def test_what_is_written_is_clean_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = attach(monkeypatch)
    console.write(HOSTILE + "\n")
    console.show_parts(HOSTILE)
    assert streams[0].getvalue() == f"{CLEAN}\n{CLEAN}\n"
    pipe = io.StringIO()
    monkeypatch.setattr(sys, "stdout", pipe)
    console.write(HOSTILE + "\n")
    console.show_parts(HOSTILE)
    assert pipe.getvalue() == f"{HOSTILE}\n{HOSTILE}\n"


def test_progress_is_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = attach(monkeypatch)
    with console.ProgressLine() as line:
        line.show(HOSTILE)
        line.show_bar(HOSTILE + "\n", 1, 2)
    assert "\x1b]" not in streams[1].getvalue()
    assert "\n" not in streams[1].getvalue()
    assert streams[1].getvalue().count(CLEAN) == 2


@pytest.mark.parametrize("columns", [20, 30, 38, 80])
def test_a_progress_line_is_one_line_of_the_terminal(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    """One that wraps could not be removed again, and each drawing would leave a line behind."""
    streams = attach(monkeypatch)
    monkeypatch.setenv("COLUMNS", str(columns))
    with console.ProgressLine() as line:
        for done in (0, 3, 7):
            line.show_bar("loading smollm2-135m", done, 7)
        line.show("loading a model with a long name …")
    for drawn in streams[1].getvalue().split("\r\x1b[K"):
        assert len(re.sub(r"\x1b\[[0-9;]*m", "", drawn)) < columns, repr(drawn)
