"""Inputs that do harm, to test the runner with; no kind of its own."""

from __future__ import annotations

import ctypes
import time
from pathlib import Path
from random import Random

from tests.fuzz.findings import Difference
from unspool.errors import LoadError

NAME = "_harmful"
HARM = {
    "nothing": "clean",
    "refuse": "refused",
    "fail": "uncaught",
    "differ": "different",
    "fill": "excess",
    "sleep": "hung",
    "crash": "crashed",
}


def make(rng: Random) -> str:
    return rng.choice(list(HARM))


def run(given: str, folder: Path) -> None:
    if given == "refuse":
        raise LoadError("no")
    if given == "fail":
        raise KeyError("x")
    if given == "differ":
        raise Difference("one and two")
    if given == "fill":
        bytearray(1 << 40)
    if given == "sleep":
        time.sleep(1000)
    if given == "crash":
        ctypes.string_at(0)
