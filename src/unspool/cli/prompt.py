"""The prompt of a command: typed, read from standard input, and put into a chat where that is asked for."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from unspool.cli.console import DIM, is_terminal, say
from unspool.cli.parser import Parser, UsageError
from unspool.cli.reading import check_text, read_stdin


def add_prompt_options(parser: Parser) -> argparse._ArgumentGroup:
    """The prompt itself, and whether it is a chat's."""
    parser.general.add_argument("prompt", metavar="PROMPT", nargs="?", help=argparse.SUPPRESS)
    group = parser.add_argument_group("prompt")
    group.add_argument("-c", "--chat", action="store_true", help="Put the prompt into the model's chat template.")
    group.add_argument("--system", metavar="TEXT", help="The system message, with --chat.")
    return group


def check_chat(arguments: argparse.Namespace) -> None:
    """Refuse a system message without a chat."""
    if arguments.system is not None and not arguments.chat:
        raise UsageError("--system is part of a chat: add --chat, or write it into the prompt")


def read_prompt(arguments: argparse.Namespace) -> str:
    """The text that was typed, or standard input."""
    if arguments.system is not None:
        check_text(arguments.system, "--system")
    if arguments.prompt is not None and arguments.prompt != "-":
        return check_text(arguments.prompt, "the prompt")
    if is_terminal(sys.stdin):
        say("Type the prompt; ctrl-d on a line of its own ends it.", DIM)
    return read_stdin("the prompt")


def as_prompt(text: str, arguments: argparse.Namespace) -> Any:
    """The text, or the messages of a chat."""
    if not arguments.chat:
        return text
    system = [] if arguments.system is None else [{"role": "system", "content": arguments.system}]
    return [*system, {"role": "user", "content": text}]
