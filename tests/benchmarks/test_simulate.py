"""The simulated clock: nothing is lost, queues behave as theory says, and a seed says everything."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st


def load_benchmark(name: str) -> ModuleType:
    """A file of benchmarks/, which is no package: it imports its neighbours as a script does."""
    folder = str(Path(__file__).parents[2] / "benchmarks")
    sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(folder)


sim = load_benchmark("simulate")
FAST = sim.MACHINES["h200-8b"]


def run(machine: Any, requests: Any, **options: Any) -> tuple[Any, Any]:
    simulation = sim.Simulation(machine, requests, **options)
    return simulation, simulation.run()


@settings(max_examples=15)
@given(
    seed=st.integers(0, 1000),
    replicas=st.integers(1, 5),
    blocks=st.integers(24, 200),
    router=st.sampled_from(["two", "least", "next"]),
    failure_hours=st.sampled_from([0.0, 0.002]),
    max_waiting=st.sampled_from([3, 1000]),
    burst=st.sampled_from([1.0, 8.0]),
)
def test_nothing_is_lost(
    seed: int, replicas: int, blocks: int, router: str, failure_hours: float, max_waiting: int, burst: float
) -> None:
    machine = FAST._replace(blocks=blocks, max_rows=32)
    requests = sim.make_arrivals(200, 20.0 * replicas, "1:700", "1:200", seed, burst)
    simulation, result = run(
        machine,
        requests,
        replicas=replicas,
        router=router,
        failure_hours=failure_hours,
        repair_seconds=3.0,
        max_waiting=max_waiting,
        seed=seed,
    )
    assert result.done + result.refused == 200
    assert 0 < result.utilisation <= 1 + 1e-9 and 0 <= result.rows <= 32
    assert result.first_p50 <= result.latency_p50 and result.latency_p50 <= result.latency_p99
    assert all(not len(one) and one.free_blocks == blocks and not one.num_running for one in simulation.replicas)
    assert (result.failures > 0) >= (result.retried > 0)


def test_short_memory_preempts_and_still_answers() -> None:
    requests = sim.make_arrivals(300, 1e6, "200", "300", 0)
    _, roomy = run(FAST, requests)
    _, tight = run(FAST._replace(blocks=200), requests)
    assert roomy.preemptions == 0 < tight.preemptions
    assert roomy.done == tight.done == 300 and tight.seconds > roomy.seconds


def test_one_row_at_a_time_waits_as_an_m_d_1_queue() -> None:
    passes, milliseconds = 10, 5.0
    machine = FAST._replace(base=milliseconds, per_row=0.0, per_key=0.0, per_token=0.0, max_rows=1)
    service = passes * milliseconds / 1000
    for load in (0.3, 0.6):
        _, result = run(machine, sim.make_arrivals(3000, load / service, "64", str(passes), 1))
        expected = service * (1 + load / (2 * (1 - load)))  # Pollaczek and Khinchine, of fixed times
        assert result.latency_mean == pytest.approx(expected, rel=0.08)
        assert result.utilisation == pytest.approx(load, rel=0.05)


def test_rows_that_are_free_let_nobody_wait() -> None:
    machine = FAST._replace(per_row=0.0, per_key=0.0, per_token=0.0, base=5.0)
    _, result = run(machine, sim.make_arrivals(1000, 20.0, "64", "40", 2))  # eight rows of 256 are taken
    service = 40 * 0.005
    assert service <= result.latency_p50 + 1e-9 and result.latency_p99 <= service + 0.0051


def test_more_replicas_answer_sooner_and_a_seed_says_everything() -> None:
    requests = sim.make_arrivals(800, 60.0, "64:512", "32:256", 3)
    found = [run(FAST, requests, replicas=count, failure_hours=0.01, seed=3)[1] for count in (1, 4, 4)]
    assert found[1].latency_p99 < found[0].latency_p99
    assert replace(found[1], took=0.0) == replace(found[2], took=0.0)
    assert sim.make_arrivals(50, 1.0, "lognormal:100:1", "9", 5) == sim.make_arrivals(
        50, 1.0, "lognormal:100:1", "9", 5
    )


@pytest.mark.parametrize("burst", [1.0, 4.0])
def test_arrivals_come_at_their_rate(burst: float) -> None:
    requests = sim.make_arrivals(30_000, 50.0, "10:20", "5", 4, burst)
    assert len(requests) / requests[-1].at == pytest.approx(50.0, rel=0.1)
    assert {one.prompt for one in requests} == set(range(10, 21)) and requests == sorted(requests)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, chart = tmp_path / "trace.txt", tmp_path / "chart.svg"
    trace.write_text("0.5 100 20\n0.1,50,10\n2 64 1\n")
    ((load, result),) = sim.main(["--arrivals", str(trace), "--chart", str(chart)])
    assert load is None and result.done == 3 and chart.read_text().endswith("</svg>")
    found = sim.main(
        ["--requests", "300", "--loads", "0.3", "0.8", "--chart", str(chart), "--json", str(tmp_path / "r")]
    )
    assert [load for load, _ in found] == [0.3, 0.8] and "first token p99" in chart.read_text()
    assert found[0][1].rows < found[1][1].rows and "| 0.80 | 300 |" in capsys.readouterr().out
    trace.write_text("0 0 nan\n")
    with pytest.raises(SystemExit, match="line 1"):
        sim.main(["--arrivals", str(trace)])


def test_the_engines_own_benchmark_takes_about_as_long() -> None:
    """256 requests at once, prompts of 64 to 1,024 tokens and 128 new ones: docs/performance.md, "The engine"."""
    for name, measured in (("h200-8b", 6249), ("h200-1b", 28254)):
        _, result = run(sim.MACHINES[name], sim.make_arrivals(256, 1e9, "64:1024", "128", 0))
        assert result.tokens_per_second == pytest.approx(measured, rel=0.15)
