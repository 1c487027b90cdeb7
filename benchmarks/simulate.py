"""The engine's own scheduler on a simulated clock: `python benchmarks/simulate.py --requests 1000000`.

Requests arrive (Poisson, in bursts, or as a file says), a router hands each to a replica, and every replica runs
`unspool.engine.scheduler.Scheduler` over a pool of blocks: who is admitted, reads, decodes and goes back to the queue
is decided by the code that decides it in the engine. Only the passes are made up: one takes
`base + per_row * rows + per_key * keys + per_token * prompt tokens`, with figures that were fitted to
docs/performance.md (MACHINES). Replicas may fail; what they had goes back to the router and begins again.

    --loads 0.5 0.7 0.9      one run for each load, as a part of what the replicas can do; a chart of latencies
    --arrivals FILE          lines of `seconds prompt_tokens new_tokens`; else poisson or bursts
    --prompt, --new          lengths: 512, 64:1024 (uniform) or lognormal:300:0.8 (median and sigma)

Prints utilisation, throughput, latency and time to the first token (p50, p99), preemptions, failures and what the
simulation itself took. Every figure follows from --seed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from simulator.arrivals import make_arrivals, read_arrivals  # benchmarks/simulator/
from simulator.book import Result
from simulator.charts import draw_loads, draw_time
from simulator.clock import Simulation, find_capacity
from simulator.replica import MACHINES

HEADER = (
    "| load | done | refused | busy | rows | tokens/s | first p50, s | first p99, s | between p50, ms | "
    "between p99, ms | whole p50, s | whole p99, s | preempted | failed | retried |"
)


def describe(load: float | None, result: Result) -> str:
    """A line of the table."""
    told = "" if load is None else f"{load:.2f}"
    return (
        f"| {told} | {result.done:,} | {result.refused:,} | {result.utilisation:.3f} | {result.rows:.1f} | "
        f"{result.tokens_per_second:,.0f} | {result.first_p50:.3f} | {result.first_p99:.3f} | "
        f"{1000 * result.between_p50:.1f} | {1000 * result.between_p99:.1f} | "
        f"{result.latency_p50:.2f} | {result.latency_p99:.2f} | {result.preemptions:,} | {result.failures:,} | "
        f"{result.retried:,} |"
    )


def main(words: Sequence[str] | None = None) -> list[tuple[float | None, Result]]:
    """Run what the options ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", choices=MACHINES, default="h200-8b")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--arrivals", default="poisson", help="poisson, bursts, or a file")
    parser.add_argument("--burst", type=float, default=5.0, help="times the rate of quiet times")
    parser.add_argument("--rate", type=float, help="requests a second, in the place of --loads")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.8])
    parser.add_argument("--prompt", default="lognormal:400:0.8")
    parser.add_argument("--new", default="lognormal:180:0.7")
    parser.add_argument("--router", choices=("two", "least", "next"), default="two")
    parser.add_argument("--failure-hours", type=float, default=0.0, help="a replica's mean life; 0: for ever")
    parser.add_argument("--repair-seconds", type=float, default=60.0)
    parser.add_argument("--max-waiting", type=int, default=4096)
    parser.add_argument("--blocks", type=int, help="of each replica, in the place of the machine's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--chart", type=Path, help="an .svg file")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(words)
    machine = MACHINES[options.machine]
    if options.blocks is not None:
        machine = machine._replace(blocks=options.blocks)
    lengths = (options.prompt, options.new)
    from_file = options.arrivals not in ("poisson", "bursts")
    capacity = 0.0 if from_file else find_capacity(machine, *lengths, seed=options.seed) * options.replicas
    loads: list[float | None] = [None] if from_file or options.rate is not None else list(options.loads)
    if capacity:
        print(f"{options.machine}: {options.replicas} replicas answer {capacity:,.2f} requests a second")
    print(HEADER + "\n" + "|---" * (HEADER.count("|") - 1) + "|")
    results: list[tuple[float | None, Result]] = []
    for load in loads:
        if from_file:
            requests = read_arrivals(Path(options.arrivals))
        else:
            rate = options.rate if load is None else load * capacity
            burst = options.burst if options.arrivals == "bursts" else 1.0
            requests = make_arrivals(options.requests, rate, *lengths, options.seed, burst)
        simulation = Simulation(
            machine,
            requests,
            replicas=options.replicas,
            router=options.router,
            failure_hours=options.failure_hours,
            repair_seconds=options.repair_seconds,
            max_waiting=options.max_waiting,
            seed=options.seed,
        )
        result = simulation.run()
        results.append((load, result))
        print(describe(load, result), flush=True)
    told = results[-1][1]
    print(f"{told.seconds:,.0f} simulated seconds, {told.passes:,} passes, in {told.took:.1f} s of processor time")
    if options.chart is not None:
        known = [(load, one) for load, one in results if load is not None]
        options.chart.write_text(draw_loads(known) if len(known) > 1 else draw_time(simulation))
    if options.json is not None:
        options.json.write_text(json.dumps([{"load": load, **asdict(one)} for load, one in results], indent=1))
    return results


if __name__ == "__main__":
    main()
