"""`unspool models`: what is installed and what can be fetched."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from unspool.cli.console import BOLD, CYAN, DIM, GREEN, format_size, paint, say, show_parts, write
from unspool.cli.parser import Parser
from unspool.loading.catalogue import DEFAULT_MODEL, available_models, installed_models

_HEADINGS = ("name", "model", "size", "licence", "status")


def build_parser() -> Parser:
    """The options of `unspool models`."""
    parser = Parser("models", "[--json]", "List the models that have a short name: installed, or how to get them.")
    parser.general.add_argument("--json", action="store_true", help="Print a JSON list instead of a table.")
    return parser


def execute(arguments: argparse.Namespace) -> int:
    """Print the table, or the list."""
    rows = _describe_models()
    if arguments.json:
        write(json.dumps(rows, ensure_ascii=False) + "\n")
        return 0
    table = [_HEADINGS, *(_format_row(row) for row in rows)]
    widths = [max(len(cells[column]) for cells in table) for column in range(len(_HEADINGS))]
    lines = [[cell.ljust(width) for cell, width in zip(cells, widths, strict=True)] for cells in table]
    show_parts(paint("  ".join(lines[0]).rstrip(), DIM, stream=sys.stdout))
    for row, (name, *cells, status) in zip(rows, lines[1:], strict=True):
        colour = GREEN if row["installed"] else CYAN
        first, last = paint(name, BOLD, stream=sys.stdout), paint(status.rstrip(), colour, stream=sys.stdout)
        show_parts(first, "  ", "  ".join(cells), "  ", last)
        if row["path"] is not None:  # on a line of its own: paths are long
            show_parts(paint(f"  {_shorten(Path(row['path']))}", DIM, stream=sys.stdout))
    say("\nA folder in the Hugging Face layout, a .gguf file or a hub id is a model's name too.", DIM)
    return 0


def _describe_models() -> list[dict[str, Any]]:
    installed = installed_models()
    return [
        {
            "name": entry.name,
            "aliases": list(entry.aliases),
            "title": entry.title,
            "parameters": entry.parameters,
            "size_bytes": entry.size_bytes,
            "licence": entry.licence,
            "default": entry.name == DEFAULT_MODEL,
            "installed": entry.name in installed,
            "path": str(installed[entry.name]) if entry.name in installed else None,
            "pull": f"unspool pull {entry.name}",
        }
        for entry in available_models()
    ]


def _format_row(row: dict[str, Any]) -> tuple[str, ...]:
    status = row["pull"] if row["path"] is None else "installed, the default" if row["default"] else "installed"
    return row["name"], row["title"], format_size(row["size_bytes"]), row["licence"], status


def _shorten(path: Path) -> str:
    """A path as a person writes it: below the current folder, below the home, or whole."""
    for folder, start in ((Path.cwd(), ""), (Path.home(), "~/")):
        if path.is_relative_to(folder):
            return start + str(path.relative_to(folder))
    return str(path)
