"""The program's front: which command, and what each end of it means to a script."""

from __future__ import annotations

import argparse
import contextlib
import errno
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from typing import Protocol, TextIO, cast

from unspool._version import __version__
from unspool.cli.console import BOLD, is_debugging_asked, is_terminal, paint, say, say_bug, say_error
from unspool.cli.parser import Parser, UsageError
from unspool.errors import UnspoolError
from unspool.wording import suggest

DONE, FAILED, REFUSED, INTERRUPTED, PIPE_CLOSED = 0, 1, 2, 130, 141
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO)  # of standard output: errors of other files name them

COMMANDS = {
    "run": "Continue a prompt, or answer it with --chat.",
    "chat": "Talk with a model, turn by turn.",
    "batch": "Answer a file of prompts; resumes after any end.",
    "serve": "Serve models over HTTP, with OpenAI's routes.",
    "studio": "Watch every way of decoding, on a page in the browser.",
    "transcribe": "Write what is said in sound files, as text or subtitles.",
    "speak": "Write the sound of a text as a WAV file: speech, or music.",
    "explain": "Draw a beam search as a tree, in the terminal and as a page.",
    "compress": "Print texts without what a small model could have guessed.",
    "detect": "Say whether a text carries a watermark, with its p value.",
    "train-detector": "Train SynthID-Text's detector on text that a model writes.",
    "recipe": "Make, check and run decoding methods of your own.",
    "models": "List the models that are installed and those that can be.",
    "pull": "Fetch a model.",
    "convert": "Rewrite a model of .bin files as one of safetensors.",
    "bench": "Measure this machine's speed, beside other engines.",
    "doctor": "Show what this machine has, and which kernels are in use.",
}
_EXAMPLE = 'unspool run "The capital of France is" --max-new-tokens 8'


class Command(Protocol):
    """The interface of a command's module."""

    def build_parser(self) -> Parser:
        """The command's options."""
        ...

    def execute(self, arguments: argparse.Namespace) -> int:
        """Do it, and return the exit code."""
        ...


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code: 0 done, 1 a bug, 2 refused, 130 interrupted, 141 broken pipe."""
    words = list(sys.argv[1:] if argv is None else argv)
    is_debugging = "--debug" in words or is_debugging_asked()
    _prepare_streams()
    logger = logging.getLogger("unspool")
    if not is_debugging and not logger.handlers:  # what the library logs is for programmers
        logger.addHandler(logging.NullHandler())
    try:
        code = _run(words, is_debugging)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        _silence()
        return PIPE_CLOSED
    except OSError as error:  # a full disk behind standard output
        _silence()
        say_error(f"standard output can't be written: {error.strerror or error}")
        return FAILED


def _run(words: list[str], is_debugging: bool) -> int:
    try:
        return _dispatch(words)
    except SystemExit as stop:  # argparse, after --help
        return stop.code if isinstance(stop.code, int) else DONE
    except KeyboardInterrupt:
        if is_terminal(sys.stderr):
            say("")
        return INTERRUPTED
    except BrokenPipeError:
        raise
    except UnspoolError as error:
        if is_debugging:
            traceback.print_exc()
        say_error(error)
        return REFUSED
    except Exception as error:
        if isinstance(error, OSError) and error.filename is None and error.errno in _FULL:
            raise
        say_bug(error, is_debugging=is_debugging)
        return FAILED


def _dispatch(words: list[str]) -> int:
    name = next((word for word in words if not word.startswith("-")), None)
    before = words[: words.index(name)] if name is not None else words
    for word in before:
        if word in ("-h", "--help"):
            print(_format_help(sys.stdout))
            return DONE
        if word in ("-V", "--version"):
            print(f"unspool {__version__}")
            return DONE
        if word != "--debug":
            raise UsageError(f"unknown option {word}{suggest(word, ('--help', '--version', '--debug'), str)}")
    if name is None:
        print(_format_help(sys.stderr), file=sys.stderr)
        return REFUSED
    rest = words[words.index(name) + 1 :]
    if name == "help":
        if not rest:
            print(_format_help(sys.stdout))
            return DONE
        name, rest = rest[0], ["--help"]
    if name not in COMMANDS:
        hint = suggest(name, COMMANDS, str) or "."
        raise UsageError(f"there is no command {name[:80]!r}{hint} The commands are: {', '.join(COMMANDS)}")
    command = cast(Command, import_module(f"unspool.cli.{name.replace('-', '_')}"))
    return command.execute(command.build_parser().read([*before, *rest]))


def _format_help(stream: TextIO) -> str:
    def heading(text: str) -> str:
        return paint(text, BOLD, stream=stream)

    commands = "\n".join(f"  {name:<16}{summary}" for name, summary in COMMANDS.items())
    return (
        f"{heading('usage')}: unspool COMMAND …   (turns a language model into text)\n"
        f"{heading('commands')}:\n{commands}\n"
        f"{heading('options')}:\n"
        "  -h, --help     Show this help; unspool COMMAND --help shows a command's.\n"
        "  -V, --version  Show the version.\n"
        "  --debug        Show the traceback of an error.\n"
        f"{heading('example')}: {_EXAMPLE}"
    )


def _prepare_streams() -> None:
    """Make standard streams writable whatever they are, and keep libraries from drawing progress bars in a pipe."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by the parent process
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, PTH123 - for the program's life
        elif hasattr(stream, "reconfigure"):
            with contextlib.suppress(ValueError, OSError):
                stream.reconfigure(errors="backslashreplace" if name == "stderr" else "replace")
    if not is_terminal(sys.stderr):
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def _silence() -> None:
    """Discard what is still buffered for standard output, so that it does not fail again when Python exits."""
    with contextlib.suppress(OSError, ValueError):  # a stream that is no file
        number = sys.stdout.fileno()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, number)
        os.close(nowhere)
