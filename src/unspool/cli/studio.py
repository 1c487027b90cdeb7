"""`unspool studio`: the server on a free port of this machine, and its page in the browser."""

from __future__ import annotations

import argparse
import sys
import threading
import webbrowser
from typing import Any

from unspool.cli.parser import Parser
from unspool.cli.serve import add_engine_options, read_engine_options
from unspool.loading.catalogue import DEFAULT_MODEL


def build_parser() -> Parser:
    """The options of `unspool studio`."""
    parser = Parser(
        "studio",
        "[MODEL…] [options]",
        "Open a page on which every way of decoding can be watched: tokens, beams, drafts, layers.\n"
        "MODEL is a short name, a folder, a .gguf file or a hub id; NAME=MODEL shows it under another name.\n"
        "The server behind the page listens on this machine alone; unspool serve has the same page at /.",
        ("unspool studio", "unspool studio model.gguf --port 9000 --no-browser"),
    )
    parser.general.add_argument("models", metavar="MODEL", nargs="*", help=argparse.SUPPRESS)
    parser.general.add_argument("--port", metavar="N", type=int, default=0, help="[a free one]")
    parser.general.add_argument("--no-browser", action="store_true", help="Print the address, and open nothing.")
    add_engine_options(parser)
    return parser


def execute(arguments: argparse.Namespace) -> int:
    """Serve, and open the page once requests are taken, until a signal ends it."""
    from unspool.server.serving import serve

    options: dict[str, Any] = read_engine_options(arguments)
    serve(
        arguments.models or [DEFAULT_MODEL],
        port=arguments.port,
        on_ready=lambda address: show_page(address, opens=not arguments.no_browser),
        loads_on_demand=arguments.on_demand,
        log="none",
        drain_seconds=2.0,
        **options,
    )
    return 0


def show_page(address: str, *, opens: bool) -> None:
    """Say where the page is, and open it."""
    print(f"the studio is at {address}/ (Ctrl-C ends it)", file=sys.stderr, flush=True)
    if opens:  # some browsers return only when they are closed
        threading.Thread(target=webbrowser.open, args=(f"{address}/",), daemon=True).start()
