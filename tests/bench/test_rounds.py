"""The rounds: who has a turn when, and what becomes of the figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from unspool.bench.benchmark import Benchmark
from unspool.bench.engine import Clock, Prompts, Timing
from unspool.bench.rounds import Figures, run_rounds
from unspool.bench.scenarios import list_scenarios


class FakeEngine:
    """Notes its calls in a log that engines share; every step takes as many seconds as it is given."""

    def __init__(self, name: str, log: list[Any], can: Sequence[str] = ("decode", "prefill", "beam", "batch")) -> None:
        self.name, self.can, self.log = name, frozenset(can), log
        self.step = 0.5
        self.fails_after: int | None = None
        self.num_short = 0

    def load(self) -> None:
        pass

    def describe(self) -> str:
        return f"a fake, {self.step} s a step"

    def generate(self, prompts: Prompts, num_new: int, *, num_beams: int = 1) -> Timing:
        self.log.append((self.name, len(prompts), len(prompts[0]), num_new, num_beams))
        if self.fails_after is not None:
            self.fails_after -= 1
            if self.fails_after < 0:
                raise ValueError("out of luck,\n  today")
        timing = Timing(0.0, [2.0 + self.step * number for number in range(num_new)])
        timing.tokens = [list(range(num_new - self.num_short)) for _ in prompts]
        return timing


def make_benchmark(**asked: Any) -> Benchmark:
    return Benchmark("fake", Path("fake.gguf"), "gguf", **{"new": 5, "prompt": 7, "prefill": 9, "batch": 3, **asked})


def run(engines: list[FakeEngine], rounds: int, **asked: Any) -> Any:
    return run_rounds(engines, list_scenarios(make_benchmark(**asked)), lambda length: [1] * length, rounds)


def test_engines_take_turns_and_another_begins_each_round() -> None:
    log: list[Any] = []
    a, b, c = (FakeEngine(name, log) for name in "abc")
    run([a, b, c], 3, only=("prefill",))
    assert [name for name, *_ in log] == ["a", "b", "c", *"abc", *"bca", *"cab"]  # the first three warm them
    log.clear()
    run([a, b], 2, only=("decode",))
    warm, full = [("a", 1, 7, 3, 1), ("b", 1, 7, 3, 1)], [("a", 1, 7, 5, 1), ("b", 1, 7, 5, 1)]
    assert log[:6] == [*warm, *full, *full[::-1]]
    assert {rows for _, rows, *_ in log[6:]} == {8}


def test_every_work_is_called_as_its_name_says() -> None:
    log: list[Any] = []
    run([FakeEngine("a", log)], 1)
    assert [call[1:] for call in log[1::2]] == [(1, 7, 5, 1), (8, 7, 5, 1), (1, 9, 1, 1), (1, 7, 5, 4), (3, 7, 5, 1)]


def test_figures() -> None:
    results = run([FakeEngine("a", [])], 2)
    medians = {label: result.median for (_, label), result in results.items()}
    assert medians == {
        "decode ×1": 500.0,
        "decode ×8": 500.0,
        "prefill 9": 2000.0,
        "beam 4": 1e3 * (2.0 + 4 * 0.5) / 5,
        "batch 3": 15 / 4.0,
    }
    assert results["a", "decode ×1"].values == [500.0] * 2  # the prompt's step is none of them
    assert len(results["a", "prefill 9"].values) == 2


def test_an_engine_does_what_it_can() -> None:
    results = run([FakeEngine("a", []), FakeEngine("b", [], can=("prefill",))], 1)
    assert [label for name, label in results if name == "b"] == ["prefill 9"]


def test_a_peer_that_fails_is_left_out_of_that_work_alone() -> None:
    log: list[Any] = []
    own, peer = FakeEngine("own", log), FakeEngine("peer", log)
    peer.fails_after = 2  # the warming and a round
    results = run([own, peer], 4, only=("prefill",))
    result = results["peer", "prefill 9"]
    assert result.failure == "ValueError: out of luck, today" and result.median is None
    assert len([name for name, *_ in log if name == "peer"]) == 3
    assert len(results["own", "prefill 9"].values) == 4
    peer.fails_after = None
    assert run([own, peer], 1, only=("prefill",))["peer", "prefill 9"].failure is None


def test_a_peer_that_stops_early_has_no_figures() -> None:
    peer = FakeEngine("peer", [])
    peer.num_short = 1
    result = run([FakeEngine("own", []), peer], 1, only=("batch",))["peer", "batch 3"]
    assert (
        result.failure is not None and "3 new tokens were asked of each of 3 rows, and [2, 2, 2] came" in result.failure
    )


def test_our_own_failure_ends_the_run() -> None:
    own = FakeEngine("own", [])
    own.fails_after = 0
    with pytest.raises(ValueError, match="out of luck"):
        run([own, FakeEngine("peer", [])], 1)


def test_progress_ends_at_its_total() -> None:
    told: list[tuple[str, int, int]] = []
    scenarios = list_scenarios(make_benchmark(only=("decode", "beam")))
    engines = [FakeEngine("a", []), FakeEngine("b", [], can=("decode",))]
    run_rounds(engines, scenarios, lambda length: [1] * length, 2, lambda *each: told.append(each))
    assert [done for _, done, _ in told] == list(range(1, 19)) and {total for *_, total in told} == {18}
    assert told[0][0] == "decode ×1, warming: a" and told[2][0] == "decode ×1, round 1 of 2: a"


def test_statistics() -> None:
    assert Figures([3.0, 1.0, 2.0]).median == 2.0
    assert Figures([4.0, 1.0, 2.0, 3.0]).median == 2.5
    assert Figures().median is None and Figures([1.0]).spread is None
    assert Figures([float(value) for value in range(1, 12)]).spread == (2.0, 10.0)


def test_the_clock_leaves_the_prompt_out() -> None:
    timing = Timing.begin()
    clock = Clock(timing)
    for value in ("prompt", "one", "two", "three"):
        clock.put(value)
    clock.end()
    assert len(timing.ends) == 3
    assert timing.started <= timing.ends[0] <= timing.ends[-1] and timing.first <= timing.total
