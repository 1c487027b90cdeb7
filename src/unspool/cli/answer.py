"""Loading a model and letting it answer, for the commands that do."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from unspool.cli.console import ProgressLine
from unspool.cli.parser import Parser
from unspool.loading.catalogue import DEFAULT_MODEL

if TYPE_CHECKING:
    from unspool.api import LanguageModel, Piece
    from unspool.outputs import Generation, Stats


def add_model_options(parser: Parser) -> None:
    """Which model, and where it computes."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "-m",
        "--model",
        metavar="NAME",
        default=DEFAULT_MODEL,
        help=f"A short name, a folder, a .gguf file or a hub id. [{DEFAULT_MODEL}]",
    )
    group.add_argument("--device", metavar="DEVICE", help="cpu, cuda or cuda:N. [the GPU where there is one]")
    group.add_argument("--dtype", metavar="DTYPE", help="float32, float16, bfloat16 or auto. [auto]")
    group.add_argument("--revision", metavar="NAME", help="A branch, tag or commit of a hub id.")
    group.add_argument("--offline", action="store_true", help="Use what is on this disk, never the network.")


def load_model(arguments: argparse.Namespace) -> LanguageModel:
    """Load what the options ask for, with a progress line on a terminal."""
    with ProgressLine() as line:
        line.show(f"loading {arguments.model} …")
        from unspool.api import load  # torch comes with it: the longest part of starting

        return load(
            arguments.model,
            device=arguments.device,
            dtype=arguments.dtype,
            revision=arguments.revision,
            offline=True if arguments.offline else None,
            progress=lambda _what, done, total: line.show_bar(f"loading {arguments.model}", done, total),
        )


class Answer:
    """One call under way: checked when it is made, computed as `pieces` is read, `stats` at any time."""

    def __init__(self, lm: LanguageModel, prompt: Any, settings: Mapping[str, Any], *, chat: bool = False) -> None:
        # lm.stream() gives the pieces alone; this is what it is made of, and it knows the costs as well.
        from unspool.api.language_model import _Answer

        self._answer = _Answer(lm, prompt, {**settings, "chat": chat})

    def pieces(self) -> Iterator[Piece]:
        """The text as it is written."""
        return self._answer.pieces()

    @property
    def stats(self) -> Stats:
        """What it has cost so far."""
        return self._answer.run.stats

    @property
    def num_rows(self) -> int:
        """How many texts are written."""
        return self._answer.run.num_rows

    def result(self) -> Generation:
        """Everything that was written, after the last piece."""
        return self._answer.result()
