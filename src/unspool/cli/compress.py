"""`unspool compress`: files without what a small model could have guessed."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from unspool.cli.console import DIM, RED, ProgressLine, can_colour, paint, say, show_parts
from unspool.cli.model import add_model_options, load_text_model
from unspool.cli.parser import Parser, UsageError
from unspool.cli.reading import LARGEST_TEXT, check_text, decode_text, read_stdin
from unspool.cli.targets import find_targets, write_target
from unspool.small_files import read_bytes

if TYPE_CHECKING:
    from unspool.compression.prompt import CompressedPrompt


def build_parser() -> Parser:
    """The options of `unspool compress`."""
    parser = Parser(
        "compress",
        "FILE… [options]",
        "Print texts without the tokens that a small model could have guessed from those before them.\n"
        "Each FILE is a context of its own; - is standard input. With a question, what it asks for stays.",
        (
            "unspool compress notes.txt --rate 0.3",
            'unspool compress chapter*.txt --question "Who built the pier?" --target-token 500',
            "unspool compress --view notes.txt",
        ),
    )
    parser.general.add_argument("files", metavar="FILE", nargs="*", help=argparse.SUPPRESS)
    group = parser.add_argument_group("what stays")
    group.add_argument("--rate", metavar="X", type=float, default=0.5, help="The share of tokens, up to 1. [0.5]")
    group.add_argument("--target-token", metavar="N", type=int, default=-1, help="The most tokens of the whole prompt.")
    group.add_argument(
        "--question", metavar="TEXT", default="", help="What the texts are to answer; stands at the end."
    )
    group.add_argument("--instruction", metavar="TEXT", default="", help="What stands before them.")
    group.add_argument(
        "--keep", metavar="TEXT", action="append", default=[], help="A text that stays; may be repeated."
    )
    group.add_argument("--keep-digits", action="store_true", help="Digits stay.")
    group.add_argument("--window", metavar="N", type=int, default=200, help="Tokens that are judged together. [200]")
    group.add_argument("--all-files", action="store_true", help="Keep some of every file: none goes as a whole.")
    files = parser.add_argument_group("output")
    files.add_argument("--view", action="store_true", help="Show the texts with what goes dimmed, or in [- -].")
    files.add_argument("--json", action="store_true", help="Print every token's loss and the counts, as JSON.")
    files.add_argument("--output", metavar="FILE", help="Write the prompt into a file.")
    files.add_argument("--force", action="store_true", help="Write over a file that exists.")
    add_model_options(parser)
    return parser


def execute(arguments: argparse.Namespace) -> int:
    """Read the files, compress them, print what is left."""
    if arguments.view and arguments.json:
        raise UsageError("--view and --json are two forms of the answer; use one of them")
    targets = find_targets(arguments, ("output",))
    texts = _read_files(arguments.files)
    lm = load_text_model(arguments)
    from unspool.compression.prompt import compress_prompt

    with ProgressLine() as line:
        made = compress_prompt(
            lm,
            texts,
            arguments.instruction,
            arguments.question,
            arguments.rate,
            arguments.target_token,
            window=arguments.window,
            keep=arguments.keep,
            keep_digits=arguments.keep_digits,
            rank_contexts=not arguments.all_files,
            progress=lambda done, total: line.show_bar("compressing", done, total),
        )
    for target in targets.values():
        write_target(target, made.text, is_forced=arguments.force)
    if arguments.json:
        print(json.dumps(made.as_dict(), ensure_ascii=False, indent=2))
    elif arguments.view:
        _show(made)
    elif not targets:
        show_parts(made.text)
    before, after = made.origin_tokens, made.compressed_tokens
    say(f"{before} tokens → {after} ({made.rate:.0%}) in {made.seconds:.1f} s", DIM)
    return 0


def _show(made: CompressedPrompt) -> None:
    """The texts, with what goes set apart."""
    has_colours = can_colour(sys.stdout)
    parts: list[str] = []
    for place in range(len(made.contexts)):
        is_open = False
        for token in (one for one in made.tokens if one.context == place):
            if has_colours:
                parts.append(token.text if token.is_kept else paint(token.text, DIM, RED, stream=sys.stdout))
                continue
            if token.is_kept == is_open:
                parts.append("-]" if is_open else "[-")
                is_open = not is_open
            parts.append(token.text)
        parts.append("-]\n" if is_open else "\n")
    show_parts(*parts)


def _read_files(names: list[str]) -> list[str]:
    if not names:
        raise UsageError("name a file, or - for standard input")
    if names.count("-") > 1:
        raise UsageError("- names standard input, which can be read once")
    texts = []
    for name in names:
        if name == "-":
            text = read_stdin("the text to compress")
        else:
            path = Path(name).expanduser()
            text = check_text(decode_text(read_bytes(path, LARGEST_TEXT), str(path)), str(path))
        if not text.strip():
            raise UsageError(f"{name!r} has no text to compress")
        texts.append(text)
    return texts
