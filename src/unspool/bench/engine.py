"""The interface of an engine: it continues token ids, and records when each step's tokens were available."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

Prompts = Sequence[Sequence[int]]
"""Token ids, one list per row, all of one length."""


@dataclass(slots=True)
class Timing:
    """One call: when it began, and when each step's tokens were available (at least the last's), in seconds."""

    started: float
    ends: list[float] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)  # the chosen tokens, one list per row

    @classmethod
    def begin(cls) -> Timing:
        """Start the clock."""
        return cls(time.perf_counter())

    def note_step(self) -> None:
        """Record that a step's tokens are available."""
        self.ends.append(time.perf_counter())

    @property
    def total(self) -> float:
        """Seconds from the start to the last step's end."""
        return self.ends[-1] - self.started

    @property
    def first(self) -> float:
        """Seconds to the first step's end: the prefill."""
        return self.ends[0] - self.started


class TimedEngine(Protocol):
    """One way to run the model. The constructor checks that it is possible; `load` reads the weights."""

    name: str
    can: frozenset[str]  # the names of the scenarios that it supports
    reads_sources: bool  # it runs encoder-decoders, whose encoder reads the prompt

    def load(self) -> None:
        """Load the model."""
        ...

    def describe(self) -> str:
        """Versions and dtype."""
        ...

    def generate(self, prompts: Prompts, num_new: int, *, num_beams: int = 1) -> Timing:
        """Continue each prompt greedily by exactly `num_new` tokens; end tokens are ignored."""
        ...


class Clock:
    """A streamer that only records when tokens arrive: the first call has the prompt."""

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._has_prompt = False

    def put(self, _value: Any) -> None:
        """Record the time."""
        if self._has_prompt:
            self._timing.note_step()
        self._has_prompt = True

    def end(self) -> None:
        """Nothing to do."""
