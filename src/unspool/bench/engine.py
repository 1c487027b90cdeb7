"""What an engine is to the benchmark: something that continues token ids, and says when each step's were there."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

Prompts = Sequence[Sequence[int]]
"""Token ids, a row each, all of one length."""


@dataclass(slots=True)
class Timing:
    """One call: when it began, and when every step's tokens were there (the last at least), in seconds."""

    started: float
    ends: list[float] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)  # what was chosen, a row each

    @classmethod
    def begin(cls) -> Timing:
        """Start the clock."""
        return cls(time.perf_counter())

    def note_step(self) -> None:
        """A step's tokens are there."""
        self.ends.append(time.perf_counter())

    @property
    def total(self) -> float:
        """Seconds from the start to the last step's end."""
        return self.ends[-1] - self.started

    @property
    def first(self) -> float:
        """Seconds to the first step's end: the prompts' reading."""
        return self.ends[0] - self.started


class Engine(Protocol):
    """One way to run the model. Making it checks that it can be; `load` reads the weights."""

    name: str
    can: frozenset[str]  # the names of the works that it does

    def load(self) -> None:
        """Read the model, and get ready."""
        ...

    def describe(self) -> str:
        """Versions, and the type of numbers it computes with."""
        ...

    def generate(self, prompts: Prompts, num_new: int, *, num_beams: int = 1) -> Timing:
        """Continue each prompt by exactly so many tokens, the likeliest ones; end tokens end nothing."""
        ...


class Clock:
    """A streamer that only notes when tokens arrive: the first it is given is the prompt."""

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._has_prompt = False

    def put(self, _value: Any) -> None:
        """Note the time."""
        if self._has_prompt:
            self._timing.note_step()
        self._has_prompt = True

    def end(self) -> None:
        """Nothing is left to do."""
