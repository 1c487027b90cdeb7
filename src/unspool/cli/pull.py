"""`unspool pull`: fetch a model."""

from __future__ import annotations

import argparse

from unspool.cli.console import ProgressLine, format_size, say, show_parts
from unspool.cli.parser import Parser
from unspool.loading.catalogue import pull

_DOING = {"wait": "waiting for another pull of", "download": "downloading", "extract": "unpacking and checking"}


def build_parser() -> Parser:
    """The options of `unspool pull`."""
    parser = Parser(
        "pull",
        "NAME",
        "Fetch a model, unless it is installed, and print its path.\n"
        "NAME is a short name (unspool models lists them) or a hub id: owner/name or owner/name:file.gguf",
        ("unspool pull smollm2-135m", "unspool pull HuggingFaceTB/SmolLM2-360M-Instruct"),
    )
    parser.general.add_argument("name", metavar="NAME", help=argparse.SUPPRESS)
    return parser


def execute(arguments: argparse.Namespace) -> int:
    """Fetch, with a bar on a terminal and one line per stage elsewhere."""
    name = arguments.name
    with ProgressLine() as line:
        furthest: dict[str, int] = {}  # by stage; a folder's size can also shrink, as files move out of it

        def report(stage: str, done: int, total: int) -> None:
            doing = f"{_DOING.get(stage, stage)} {name}"
            if stage not in furthest and stage != "present" and not line.is_live:
                say(f"{doing} ({format_size(total)}) …")
            furthest[stage] = max(done, furthest.get(stage, 0))
            if stage != "present":
                line.show_bar(doing, furthest[stage], total)

        line.show(f"looking for {name} …")
        path = pull(name, report)
    say(f"{name} is here{' already' if 'present' in furthest else ''}:")
    show_parts(str(path))
    return 0
