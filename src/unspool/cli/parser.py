"""Reading a command line: argparse with help worth reading, and errors that guess what was meant."""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import NoReturn

from unspool.cli.console import BOLD, paint
from unspool.errors import UnspoolError
from unspool.wording import suggest

FLAG = "true|false"  # the metavar of flags whose value may also be given
_FLAG_WORDS = frozenset({"true", "false", "on", "off", "yes", "no", "none", "null"})


class UsageError(UnspoolError):
    """The command line can't be read."""


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Options in one column, with headings that stand out on a terminal."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=min(100, shutil.get_terminal_size().columns - 2))

    def start_section(self, heading: str | None) -> None:
        super().start_section(None if heading is None else paint(heading, BOLD, stream=sys.stdout))

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        # Sentences are filled to the width of the terminal. Examples, which are indented, stay whole, to be copied.
        joined = re.sub(r"(?<![.:;])\n(?=\S)", " ", text)
        lines = (
            [line] if line.startswith(" ") or len(line) <= width else textwrap.wrap(line, width)
            for line in joined.splitlines()
        )
        return "\n".join(indent + one for filled in lines for one in filled or [""]) + "\n"

    def _format_action_invocation(self, action: argparse.Action) -> str:
        # One line per option, the same in every Python version: `-m, --model NAME`.
        if not action.option_strings:
            return super()._format_action_invocation(action)
        if action.metavar == FLAG:
            return action.option_strings[0].replace("--", "--[no-]", 1)
        shown = [name for name in action.option_strings if "_" not in name]  # the other spelling is not shown
        return ", ".join(shown) + ("" if action.nargs == 0 else f" {action.metavar}")


class Parser(argparse.ArgumentParser):
    """A command's options. `read` raises UsageError, while argparse would print and exit."""

    def __init__(self, command: str, usage: str, description: str, examples: Sequence[str] = ()) -> None:
        shown = "\n".join(f"  {example}" for example in examples)
        super().__init__(
            prog=f"unspool {command}",
            usage=f"unspool {command} {usage}".strip(),
            description=description,
            epilog=f"{paint('examples', BOLD, stream=sys.stdout)}:\n{shown}" if examples else None,
            formatter_class=HelpFormatter,
            allow_abbrev=False,
            add_help=False,
        )
        self.flags: set[str] = set()  # the options whose metavar is FLAG
        self.general = self.add_argument_group("general")
        self.general.add_argument("-h", "--help", action="help", help="Show this help.")
        self.general.add_argument("--debug", action="store_true", help="Show the traceback of an error.")

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        """Parse; unknown options and stray words are errors that say what was probably meant."""
        arguments, extra = self.parse_known_args(join_flags(words, self.flags))
        if extra:
            self._refuse(extra)
        return arguments

    def _refuse(self, extra: Sequence[str]) -> NoReturn:
        option = next((word for word in extra if word.startswith("-") and word != "-"), None)
        if option is None:
            advice = "Put text of several words in quotes" if self._get_positional_actions() else "Give options alone"
            model = "; a model is named with --model" if "--model" in self._option_string_actions else ""
            self.error(f"one argument too many: {extra[0]!r}. {advice}{model}")
        name = option.partition("=")[0]
        if name in ("-m", "--model") and any("MODEL" in str(one.metavar) for one in self._get_positional_actions()):
            self.error(f"unknown option {name}: a model is named without one, as in {self.prog} NAME")
        hint = suggest(
            name.replace("_", "-"), [known for known in self._option_string_actions if "_" not in known], str
        )
        self.error(f"unknown option {name}{hint}")

    def error(self, message: str) -> NoReturn:
        """Raise instead of exiting: the program's one place for errors prints it."""
        said = re.sub(r"invalid (\w+) value: (.*)", lambda found: _explain_value(found[1], found[2]), message)
        raise UsageError(f"{said} (see: {self.prog} --help)")


def _explain_value(kind: str, value: str) -> str:
    """Argparse's word for a value of the wrong type in words of this program."""
    wanted = {"int": "a whole number", "float": "a number"}.get(kind)
    return f"{value} is not {wanted}" if wanted else f"{value} can't be read"


def join_flags(words: Sequence[str], flags: Iterable[str]) -> list[str]:
    """Give flags their value with `=`, so that `--do-sample "A prompt"` does not take the prompt for one."""
    names = frozenset(flags)
    joined: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word == "--":
            return [*joined, word, *rest]
        if word in names:
            value = rest.pop(0) if rest and rest[0].strip().lower() in _FLAG_WORDS else "true"
            word = f"{word}={value}"
        joined.append(word)
    return joined
