"""The loop: every strategy, stream and result goes through it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from unspool.outputs import Stats, TokenLogprob


@dataclass(frozen=True, slots=True)
class LiveBeam:
    """A beam as it stands: its new tokens, its log-probability (or final score), and why it ended, if it did."""

    tokens: list[int]
    score: float
    reason: str | None


@dataclass(slots=True)
class Emitted:
    """What one turn added to the call's rows."""

    tokens: dict[int, list[int]]  # by row of the call
    finished: dict[int, str]  # rows that are done with this turn, and why
    logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)
    beams: list[list[LiveBeam]] | None = None  # every prompt's beams, where the whole table was asked for
    seen: Any = None  # what the call's observer made of the turn


@dataclass(slots=True)
class Result:
    """What a strategy adds to the output of a call."""

    fields: dict[str, Any] = field(default_factory=dict)  # of the output object
    sequences: torch.Tensor | None = None  # its own, if they are not the prompts with what was emitted


class Turns(Protocol):
    """A strategy at work: one turn is (mostly) one pass, and what is made of it."""

    @property
    def reads_choice(self) -> bool:
        """Whether a token has been read when it is emitted."""
        ...

    def is_done(self) -> bool:
        """Whether every row has ended."""
        ...

    def turn(self) -> Emitted:
        """Score the next tokens, choose, let the rows follow; return what became certain."""
        ...

    def result(self) -> Result:
        """What it adds to the output, as far as it has come."""
        ...

    def close(self) -> None:
        """Called after the last turn, or when the caller stops: undo what nobody has seen."""
        ...


def run_turns(
    turns: Turns, stats: Stats, started: float, scope: Callable[[], AbstractContextManager[None]] = nullcontext
) -> Iterator[Emitted]:
    """Take turns, each in a scope, until all is done; closing the iterator stops the work."""
    while not turns.is_done():
        with torch.no_grad(), scope():  # not around the yield: the caller's own grad mode is the caller's
            emitted = turns.turn()
        stats.new_tokens += sum(map(len, emitted.tokens.values()))
        stats.total_seconds = time.perf_counter() - started
        stats.first_token_seconds = stats.first_token_seconds or stats.total_seconds
        yield emitted
