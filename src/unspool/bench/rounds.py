"""The measurement: every engine runs once in every round of every scenario: a slow minute affects all."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from unspool.bench.engine import Prompts, TimedEngine, Timing
from unspool.bench.scenarios import Scenario, count_calls

Progress = Callable[[str, int, int], None]
_WARM_TOKENS = 3  # of the call before the first round


@dataclass(slots=True)
class Figures:
    """An engine's figures of one scenario."""

    values: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)  # the first row's, of the last round
    failure: str | None = None

    @property
    def median(self) -> float | None:
        """The median of all figures; None if there are none."""
        return statistics.median(self.values) if self.values else None

    @property
    def spread(self) -> tuple[float, float] | None:
        """The 10th and the 90th percentile of the figures."""
        if len(self.values) < 2:
            return None
        tenths = statistics.quantiles(self.values, n=10, method="inclusive")
        return tenths[0], tenths[-1]


def run_rounds(
    engines: Sequence[TimedEngine],
    scenarios: Sequence[Scenario],
    prompt_of: Callable[[int], list[int]],
    rounds: int,
    progress: Progress | None = None,
) -> dict[tuple[str, str], Figures]:
    """Every engine's result of every scenario that it does, by the engine's name and the scenario's label.

    An engine that fails in a scenario is left out of the rest of it, and its error is recorded: the others' figures are
    kept. Ours comes first and may not fail.
    """
    total, done = count_calls(scenarios, len(engines), rounds), 0
    results: dict[tuple[str, str], Figures] = {}
    for scenario in scenarios:
        prompts = [prompt_of(scenario.prompt)] * scenario.num_rows
        able = [engine for engine in engines if scenario.name in engine.can]
        for engine in able:
            results[engine.name, scenario.label] = Figures()
        for number in range(-1, rounds):  # round -1 warms them
            for engine in _rotate(engines, max(0, number)):
                done += 1
                if progress is not None:
                    which = "warming" if number < 0 else f"round {number + 1} of {rounds}"
                    progress(f"{scenario.label}, {which}: {engine.name}", done, total)
                result = results.get((engine.name, scenario.label))
                if result is not None and result.failure is None:
                    _take_turn(
                        engine, scenario, prompts, result, is_warming=number < 0, may_fail=engine is not engines[0]
                    )
    return results


def _rotate(engines: Sequence[TimedEngine], number: int) -> list[TimedEngine]:
    """A round's order: each round starts with another engine, so that none always follows the same one."""
    first = number % len(engines)
    return [*engines[first:], *engines[:first]]


def _take_turn(
    engine: TimedEngine, scenario: Scenario, prompts: Prompts, result: Figures, *, is_warming: bool, may_fail: bool
) -> None:
    num_new = min(scenario.num_new, _WARM_TOKENS) if is_warming else scenario.num_new
    try:
        timing = engine.generate(prompts, num_new, num_beams=scenario.num_beams)
        _check(timing, scenario, num_new)
    except Exception as error:
        if not may_fail:
            raise
        result.failure = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        result.values.clear()
        return
    if not is_warming:
        result.values += scenario.read(timing)
        result.tokens = timing.tokens[0]


def _check(timing: Timing, scenario: Scenario, num_new: int) -> None:
    """Raise if a call generated fewer tokens than asked: its time would not be comparable."""
    counts = [len(row) for row in timing.tokens]
    if counts != [num_new] * scenario.num_rows or not timing.ends:
        raise RuntimeError(
            f"{num_new} new tokens were asked of each of {scenario.num_rows} rows, and {counts[:8]} came"
        )
