"""Calls of tiny models beside transformers' own `generate`: the same tokens, scores, shapes, types and refusals."""

from __future__ import annotations

from pathlib import Path
from random import Random

from tests.fuzz.beside.calls import Call, draw
from tests.fuzz.beside.trying import shrink, try_call, write_script
from tests.fuzz.findings import Difference

NAME = "beside_transformers"
SHORT = 40


def make(rng: Random) -> Call:
    """A call."""
    return draw(rng)


def run(call: Call, folder: Path) -> None:
    """Make the call by transformers and by ours, and compare."""
    found = try_call(call)
    if found:
        call, unlike = shrink(call, found[0])
        told = "\n".join(map(str, found))
        raise Difference(f"{told}\n\n# smaller: {unlike.kind}, {unlike.way}\n{write_script(call)}")
