"""Models for actors: made in each of them, and able to end the process that they run in."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from tests.engine.fakes import BLOCK_BYTES, Fake
from tests.server.running import make_fake_lm
from unspool.api import LanguageModel

ENGINE = {"memory": BLOCK_BYTES * 4000, "max_rows": 8}
LINES = [{"prompt": "abcdefg "[: 1 + n % 8] * (1 + n % 5), "id": f"row {n}"} for n in range(1, 121)]


class Deadly(Fake):
    """A model that ends its process after some passes, as often as `folder` does not say that it has."""

    folder = Path()
    deaths, after, seconds = 1, 12, 0.01
    passes = 0

    def forward(self, *args: Any, **named: Any) -> Any:
        time.sleep(self.seconds)
        type(self).passes += 1
        if self.passes > self.after and len(list(self.folder.glob("death.*"))) < self.deaths:
            (self.folder / f"death.{os.getpid()}").touch()
            os._exit(1)  # as the kernel ends a process that takes too much memory
        return super().forward(*args, **named)


class MakeDeadly:
    """Makes such a model in an actor."""

    def __init__(self, folder: Path, deaths: int = 1, seconds: float = 0.01) -> None:
        self.folder, self.deaths, self.seconds = folder, deaths, seconds

    def __call__(self) -> LanguageModel:
        Deadly.folder, Deadly.deaths, Deadly.seconds = self.folder, self.deaths, self.seconds
        return make_fake_lm(Deadly(vocab=160, max_context=2048))
