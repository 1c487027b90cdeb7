"""The prompt of a command: typed or read from standard input, and put into a chat if that is asked for."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
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
    group.add_argument(
        "--negative-prompt",
        "--negative_prompt",
        metavar="TEXT",
        help="A negative prompt, with --guidance-scale.",
    )
    return group


def check_prompt(arguments: argparse.Namespace, settings: Mapping[str, Any]) -> None:
    """Raise for options without the option that they depend on."""
    if arguments.system is not None and not arguments.chat:
        raise UsageError("--system is part of a chat: add --chat, or write it into the prompt")
    if arguments.negative_prompt is not None:
        if settings.get("guidance_scale") is None:
            raise UsageError("--negative-prompt is read by guidance alone: add --guidance-scale (1.5, for instance)")
        check_text(arguments.negative_prompt, "--negative-prompt")


def read_prompt(arguments: argparse.Namespace) -> str:
    """The text that was typed, or standard input."""
    if arguments.system is not None:
        check_text(arguments.system, "--system")
    if arguments.prompt is not None and arguments.prompt != "-":
        return check_text(arguments.prompt, "the prompt")
    if is_terminal(sys.stdin):
        say("Type the prompt; ctrl-d on a line of its own ends it.", DIM)
    return read_stdin("the prompt")


def read_negative(arguments: argparse.Namespace) -> dict[str, Any]:
    """The negative prompt as an argument of the library: in a chat it replaces the prompt."""
    text = arguments.negative_prompt
    return {} if text is None else {"negative_prompt": as_prompt(text, arguments)}


def as_prompt(text: str, arguments: argparse.Namespace) -> Any:
    """The text, or the messages of a chat."""
    if not arguments.chat:
        return text
    system = [] if arguments.system is None else [{"role": "system", "content": arguments.system}]
    return [*system, {"role": "user", "content": text}]
