"""The screen: model text goes to standard output, everything else to standard error."""

from __future__ import annotations

import os
import shutil
import sys
import time
import traceback
from typing import TextIO

BOLD, DIM, RED, GREEN, YELLOW, CYAN = "1", "2", "31", "32", "33", "36"
_SECONDS_BETWEEN_DRAWINGS = 0.05
_BAR_WIDTH = 24
# What a model writes must not move the cursor or recolour the screen.
_CONTROLS = {code: "\ufffd" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


def is_terminal(stream: TextIO | None) -> bool:
    """Whether this stream is a terminal."""
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # closed
        return False


def can_colour(stream: TextIO) -> bool:
    """Whether to use colours: on a terminal that has them, unless NO_COLOR is set (no-color.org)."""
    return is_terminal(stream) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class Painted(str):
    """Text that is ready for a stream: cleaned, and in its colours."""


def clean(text: str) -> str:
    """The text without what could move the cursor or recolour the screen."""
    return text if isinstance(text, Painted) else text.translate(_CONTROLS)


def paint(text: str, *styles: str, stream: TextIO) -> Painted:
    """The text, cleaned, in these styles if the stream takes colours."""
    text = clean(text)
    return Painted(f"\x1b[{';'.join(styles)}m{text}\x1b[0m" if styles and can_colour(stream) else text)


def say(text: str, *styles: str) -> None:
    """Print a line about the work, on standard error."""
    print(paint(text, *styles, stream=sys.stderr), file=sys.stderr, flush=True)


def say_parts(*parts: str) -> None:
    """Print a line on standard error whose parts are painted, or else cleaned."""
    print("".join(map(clean, parts)), file=sys.stderr, flush=True)


def show_parts(*parts: str) -> None:
    """Print a line on standard output whose parts are painted, or else cleaned if it is a terminal."""
    print("".join(map(clean, parts)) if is_terminal(sys.stdout) else "".join(parts), flush=True)


def say_error(text: object) -> None:
    """Print an error in the form that all errors have."""
    say_parts(paint("unspool: error:", BOLD, RED, stream=sys.stderr), f" {text}")


def is_debugging_asked() -> bool:
    """Whether UNSPOOL_DEBUG asks for tracebacks."""
    return os.environ.get("UNSPOOL_DEBUG", "0") not in ("", "0")


def say_bug(error: BaseException, *, is_debugging: bool) -> None:
    """Print an internal error: one line, or the traceback."""
    if is_debugging:
        say("".join(traceback.format_exception(error)).rstrip("\n"))
    hint = "" if is_debugging else "\n(--debug or UNSPOOL_DEBUG=1 shows where this happened)"
    say_error(f"internal: {type(error).__name__}: {error}{hint}")


def write(text: str) -> None:
    """Write model text to standard output at once; on a terminal without its control characters."""
    sys.stdout.write(clean(text) if is_terminal(sys.stdout) else text)
    sys.stdout.flush()


class AnswerWriter:
    """Writes an answer as it comes: thoughts dimmed, on standard error, and what is said on standard output."""

    def __init__(self) -> None:
        self._thought = ""  # the last piece of a thought, while one is written

    def write(self, text: str, *, is_thought: bool) -> None:
        """Write a piece."""
        if is_thought:
            sys.stderr.write(paint(text, DIM, stream=sys.stderr))
            sys.stderr.flush()
            self._thought = text or self._thought
            return
        self.end_thought()
        write(text)

    def end_thought(self) -> None:
        """End a thought's last line, so that what follows begins one."""
        if self._thought:
            sys.stderr.write("\n" if self._thought.endswith("\n") else "\n\n")
            sys.stderr.flush()
            self._thought = ""


def end_line(written: str) -> None:
    """End what was written with a newline, unless it has one."""
    if not written.endswith("\n"):
        write("\n")


def format_size(num_bytes: int) -> str:
    """98362432 as 98 MB."""
    size, unit = float(num_bytes), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 999.5:
            break
        size, unit = size / 1000, larger
    return f"{size:.1f} {unit}" if size < 9.95 and unit != "B" else f"{size:.0f} {unit}"


class ProgressLine:
    """One line on standard error that redraws itself and is removed at the end; nothing in a pipe."""

    def __init__(self) -> None:
        self.is_live = is_terminal(sys.stderr) and os.environ.get("TERM") != "dumb"
        self._is_drawn = False
        self._last_drawing = float("-inf")
        self._last_label = ""

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def show(self, label: str) -> None:
        """Show what is being done."""
        self._draw(paint(self._cut(label), DIM, stream=sys.stderr))

    def show_bar(self, label: str, done: int, total: int) -> None:
        """Show the progress; drawn a few times per second, whenever the label changes and at the end."""
        now = time.monotonic()
        is_due = now - self._last_drawing >= _SECONDS_BETWEEN_DRAWINGS or label != self._last_label or done >= total
        if not self.is_live or not is_due:
            return
        self._last_drawing, self._last_label = now, label
        share = min(1.0, max(0.0, done / total)) if total > 0 else 0.0
        width = max(4, min(_BAR_WIDTH, shutil.get_terminal_size().columns - 16))  # some letters of the label, the share
        filled = round(share * width)
        bar = paint("━" * filled, CYAN, stream=sys.stderr)
        rest = paint("─" * (width - filled), DIM, stream=sys.stderr)
        self._draw(f"{clean(self._cut(label, width + 7))} {bar}{rest} {share:4.0%}")

    def clear(self) -> None:
        """Remove the line."""
        if self._is_drawn:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self._is_drawn = False

    def _draw(self, line: str) -> None:
        if self.is_live:
            sys.stderr.write(f"\r\x1b[K{line}")
            sys.stderr.flush()
            self._is_drawn = True

    def _cut(self, label: str, taken: int = 0) -> str:
        # A line that wraps can't be removed again.
        label = " ".join(label.split("\n"))
        room = max(8, shutil.get_terminal_size().columns - taken - 1)
        return label if len(label) <= room else label[: room - 1] + "…"
