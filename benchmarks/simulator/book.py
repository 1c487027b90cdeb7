"""What is noted while a simulation runs, and what it found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from simulator.arrivals import Arrival


@dataclass
class Book:
    """What is noted while a simulation runs."""

    requests: Sequence[Arrival]
    width: float  # seconds of a slice of the chart
    firsts: dict[int, float] = field(default_factory=dict)
    latencies: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)  # to the first token
    between: list[float] = field(default_factory=list)  # tokens of a request, on average
    new_tokens: int = 0
    prompt_tokens: int = 0  # that were read, again after a preemption too
    preemptions: int = 0
    retried: int = 0
    refused: int = 0
    failures: int = 0
    passes: int = 0
    row_passes: int = 0
    slices: dict[int, list[float]] = field(default_factory=dict)  # busy seconds, rows and waiting times seconds

    def note_pass(self, now: float, seconds: float, rows: int, tokens: int, waiting: int) -> None:
        """Count a pass."""
        self.passes += 1
        self.row_passes += rows
        self.prompt_tokens += tokens
        one = self.slices.setdefault(int(now / self.width), [0.0, 0.0, 0.0])
        one[0] += seconds
        one[1] += rows * seconds
        one[2] += waiting * seconds

    def note_token(self, number: int, now: float) -> None:
        """Note a first token; one that comes again after a preemption is not the first."""
        self.firsts.setdefault(number, now)

    def note_done(self, number: int, now: float) -> None:
        """Note a request's end."""
        request = self.requests[number]
        first = self.firsts.pop(number)
        self.latencies.append(now - request.at)
        self.waits.append(first - request.at)
        if request.new > 1:
            self.between.append((now - first) / (request.new - 1))
        self.new_tokens += request.new


@dataclass(frozen=True)
class Result:
    """What a simulation found."""

    requests: int
    done: int
    refused: int
    replicas: int
    seconds: float  # of the simulated clock
    utilisation: float  # part of the time in which replicas that are up compute
    rows: float  # that a pass decodes, on average
    tokens_per_second: float
    latency_p50: float
    latency_p99: float
    latency_mean: float
    first_p50: float
    first_p99: float
    between_p50: float
    between_p99: float
    preemptions: int
    failures: int
    retried: int
    passes: int
    took: float  # processor seconds of this machine


def find_part(values: Sequence[float], part: float) -> float:
    """A percentile of values that are sorted; 0 if there are none."""
    return values[min(len(values) - 1, int(part * len(values)))] if values else 0.0
