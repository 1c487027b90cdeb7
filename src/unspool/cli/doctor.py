"""`unspool doctor`: what this machine has, which kernels are in use, and why."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from importlib.metadata import PackageNotFoundError, version

from unspool._version import __version__
from unspool.cli.console import BOLD, GREEN, YELLOW, paint, show_parts, write
from unspool.cli.parser import Parser

_LIBRARIES = ("torch", "numpy", "safetensors", "tokenizers", "triton", "transformers")


def build_parser() -> Parser:
    """The options of `unspool doctor`."""
    parser = Parser("doctor", "[--json]", "Show what this machine has, which kernels are in use, and why.")
    parser.general.add_argument("--json", action="store_true", help="Print a JSON object.")
    return parser


def execute(arguments: argparse.Namespace) -> int:
    """Print the findings."""
    found = examine()
    if arguments.json:
        write(json.dumps(found, ensure_ascii=False) + "\n")
        return 0
    width = max(map(len, found))
    for name, value in found.items():
        text = value if isinstance(value, str) else ", ".join(f"{key} {val}" for key, val in value.items())
        is_missing = text.startswith(("none", "not in use"))
        colour = YELLOW if is_missing else GREEN if name.endswith("kernels") else ""
        painted = paint(text, colour, stream=sys.stdout) if colour else text
        show_parts(paint(name.ljust(width), BOLD, stream=sys.stdout), "  ", painted)
    return 0


def examine() -> dict[str, str | dict[str, str]]:
    """Everything that decides how fast a model runs here."""
    import torch

    from unspool.kernels.cpu import find_library, why_missing
    from unspool.loading.catalogue import DEFAULT_MODEL, installed_models

    library = find_library()
    if library is None:
        kernels = f"not in use: {why_missing()}"
    else:
        others = [name for name in library.available if name != library.instructions]
        kernels = f"{library.instructions}, {library.threads} thread{'' if library.threads == 1 else 's'}"
        kernels += f" (also here: {', '.join(others)})" if others else ""
    gpu = "none that torch finds"
    if torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(0).total_memory / 2**30
        gpu = f"{torch.cuda.get_device_name(0)}, {memory:.0f} GiB"
    return {
        "unspool": __version__,
        "python": platform.python_version(),
        "libraries": {name: found for name in _LIBRARIES if (found := _find_version(name))},
        "machine": f"{platform.machine()}, {platform.system()}",
        "cpu kernels": kernels,
        "gpu": gpu,
        "gpu kernels": "Triton" if torch.cuda.is_available() and _find_version("triton") else "none: no GPU",
        "default model": str(installed_models().get(DEFAULT_MODEL, f"none here: unspool pull {DEFAULT_MODEL}")),
    }


def _find_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
