"""`unspool convert`: rewrite a model that exists only as pickles."""

from __future__ import annotations

import argparse
from pathlib import Path

from unspool.cli.console import ProgressLine, format_size, say, show_parts
from unspool.cli.parser import Parser
from unspool.loading.conversion.pickled import convert_folder
from unspool.loading.source import find_source


def build_parser() -> Parser:
    """The options of `unspool convert`."""
    parser = Parser(
        "convert",
        "MODEL OUT",
        "Rewrite a model whose weights are pickles (pytorch_model.bin, or its shards) as a folder with safetensors.\n"
        "MODEL is a folder or a hub id. A confined process reads the pickles: docs/security.md",
        ("unspool convert Baichuan2-13B-Chat/ Baichuan2-13B-Chat-safetensors/",),
    )
    parser.general.add_argument("model", metavar="MODEL", help=argparse.SUPPRESS)
    parser.general.add_argument("out", metavar="OUT", help=argparse.SUPPRESS)
    return parser


def execute(arguments: argparse.Namespace) -> int:
    """Rewrite, with a bar on a terminal."""
    folder, target = find_source(arguments.model), Path(arguments.out)
    with ProgressLine() as line:
        line.show(f"reading {folder.name} …")
        convert_folder(folder, target, lambda done, total: line.show_bar(f"rewriting {folder.name}", done, total))
    size = sum(path.stat().st_size for path in target.glob("*.safetensors"))
    say(f"{format_size(size)} of weights are here:")
    show_parts(str(target))
    return 0
