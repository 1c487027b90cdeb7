"""What is measured: each scenario is a number of prompts, their length, and how a call's times become one figure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from unspool.bench.benchmark import Benchmark
from unspool.bench.engine import Timing


@dataclass(frozen=True, slots=True)
class Scenario:
    """One column of the table."""

    name: str  # of its kind: as in `--only` and `TimedEngine.can`
    label: str
    unit: str
    num_rows: int
    prompt: int  # tokens
    num_new: int
    read: Callable[[Timing], list[float]]  # a call's figures, of which the median over all rounds is taken
    num_beams: int = 1
    is_rate: bool = False  # more is better
    is_step: bool = False  # the figure is a step's time, which has a floor


NUM_BEAMS: Final = 4
_FEW_ROWS: Final = 8


def list_scenarios(benchmark: Benchmark) -> list[Scenario]:
    """The scenarios of a benchmark, in the table's order."""
    prompt, new = benchmark.prompt, benchmark.new
    scenarios = [
        *(
            Scenario("decode", f"decode ×{rows}", "ms a step", rows, prompt, new, _read_steps, is_step=True)
            for rows in (1, _FEW_ROWS)
        ),
        Scenario("prefill", f"prefill {benchmark.prefill}", "ms", 1, benchmark.prefill, 1, _read_prompt),
        Scenario("beam", f"beam {NUM_BEAMS}", "ms a step", 1, prompt, new, _read_mean, num_beams=NUM_BEAMS),
        Scenario(
            "batch", f"batch {benchmark.batch}", "tokens/s", benchmark.batch, prompt, new, _read_rate, is_rate=True
        ),
    ]
    return [scenario for scenario in scenarios if scenario.name in benchmark.only]


def _read_steps(timing: Timing) -> list[float]:
    """The mean of a call's steps after the prompt's: an engine may report several of them at once."""
    if len(timing.ends) < 2:
        return _read_mean(timing)
    return [1e3 * (timing.total - timing.first) / (len(timing.ends) - 1)]


def _read_prompt(timing: Timing) -> list[float]:
    return [1e3 * timing.first]


def _read_mean(timing: Timing) -> list[float]:
    """A call's time divided by its steps: for searches, which report nothing before their end."""
    return [1e3 * timing.total / max(1, len(timing.tokens[0]))]


def _read_rate(timing: Timing) -> list[float]:
    """New tokens per second of the whole call, including the prefill."""
    return [sum(map(len, timing.tokens)) / timing.total]


def count_calls(scenarios: Sequence[Scenario], num_engines: int, rounds: int) -> int:
    """The number of calls of a whole run, including warm-up: the total of the progress bar."""
    return len(scenarios) * num_engines * (rounds + 1)
