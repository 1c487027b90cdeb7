"""The lines of a chat: typed at a prompt with a history, or read from a pipe."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from types import ModuleType

from unspool.cli.console import BOLD, GREEN, can_colour, is_terminal
from unspool.cli.reading import LONGEST_LINE, decode_text, open_stdin
from unspool.errors import InputError
from unspool.loading.catalogue import store_folder

MOST_REMEMBERED = 1000
LARGEST_HISTORY = 8 << 20  # bytes


class Lines:
    """Where a chat's messages come from; `read` returns None at the end."""

    def __init__(self) -> None:
        self.is_interactive = is_terminal(sys.stdin) and is_terminal(sys.stdout)
        self._readline = _import_readline() if self.is_interactive else None

    def __enter__(self) -> Lines:
        if self._readline is not None:
            _recall(self._readline, _history_file())
        return self

    def __exit__(self, *_: object) -> None:
        if self._readline is not None:
            _remember(self._readline, _history_file())

    def read(self) -> str | None:
        """The next line without its newline."""
        if self.is_interactive:
            return self._ask()
        data = open_stdin("a chat").readline(LONGEST_LINE + 1)
        if len(data) > LONGEST_LINE:
            raise InputError(f"a line has more than {LONGEST_LINE} bytes, the most that are read")
        return decode_text(data, "standard input").rstrip("\r\n") if data else None

    def _ask(self) -> str | None:
        prompt = "> "
        if can_colour(sys.stdout):
            # readline counts what is between \1 and \2 as having no width.
            start, end = f"\x1b[{BOLD};{GREEN}m", "\x1b[0m"
            prompt = f"\1{start}\2>\1{end}\2 " if self._readline is not None else f"{start}>{end} "
        try:
            line = input(prompt)
        except EOFError:
            return None
        except UnicodeDecodeError as error:
            raise InputError("the line is not UTF-8 text") from error
        if len(line) > LONGEST_LINE:
            raise InputError(f"the line has more than {LONGEST_LINE} characters, the most that are read")
        return line


def _import_readline() -> ModuleType | None:
    try:
        import readline  # not there on Windows
    except ImportError:
        return None
    return readline


def _history_file() -> Path:
    return store_folder() / "chat_history"


def _recall(readline: ModuleType, path: Path) -> None:
    readline.set_history_length(MOST_REMEMBERED)
    with contextlib.suppress(OSError):  # there is none yet, or it is another library's
        if path.stat().st_size <= LARGEST_HISTORY:
            readline.read_history_file(str(path))


def _remember(readline: ModuleType, path: Path) -> None:
    with contextlib.suppress(OSError):  # a history is not worth an error
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)  # a conversation is private
        readline.write_history_file(str(path))
