"""What an engine has done and is doing."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from unspool.outputs import Stats

_KEPT: Final = 1024  # requests whose times are remembered
_WINDOW: Final = 10.0  # seconds over which the rate is measured


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A look at an engine."""

    rows_running: int
    requests_running: int
    requests_waiting: int
    requests_done: int  # ended as they should
    requests_failed: int
    requests_cancelled: int  # by the caller, a deadline or the engine's end
    new_tokens: int
    prompt_tokens: int  # that were read: what was found again is not among them
    passes: int
    preemptions: int
    tokens_per_second: float  # new tokens over the last seconds
    blocks: int  # in all
    blocks_used: int  # by rows, each once
    blocks_shared: int  # of those, by more than one row
    blocks_kept: int  # that only the index of prefixes holds
    blocks_moved: int  # of requests that wait, in the host's memory
    prefix_hit_rate: float  # tokens of prompts that were found, of all that were looked for
    first_token_seconds: float  # median of the last requests
    token_seconds: float  # median time between tokens of a request


@dataclass(slots=True)
class Counters:
    """What the driving thread counts."""

    done: int = 0
    failed: int = 0
    cancelled: int = 0
    new_tokens: int = 0
    prompt_tokens: int = 0
    firsts: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    between: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    _recent: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=4096))

    def note_tokens(self, count: int) -> None:
        """Count new tokens."""
        self.new_tokens += count
        self._recent.append((time.monotonic(), count))

    def note_times(self, stats: Stats, num_rows: int) -> None:
        """Remember when a request of so many rows had its first token, and how long the others took."""
        self.firsts.append(stats.first_token_seconds)
        if stats.new_tokens > num_rows:
            steps = stats.new_tokens / num_rows - 1
            self.between.append((stats.total_seconds - stats.first_token_seconds) / steps)

    def find_rate(self) -> float:
        """New tokens per second of late."""
        now = time.monotonic()
        recent = [(when, count) for when, count in list(self._recent) if now - when <= _WINDOW]
        if len(recent) < 2:
            return 0.0
        return sum(count for _, count in recent) / max(1e-9, now - recent[0][0])


def find_median(values: Sequence[float]) -> float:
    """The median; 0 if there is nothing."""
    return statistics.median(values) if values else 0.0
