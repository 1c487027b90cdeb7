"""The cost of sampling after the logits, and the launches of a sampling step compared with a greedy one.

`python benchmarks/gpu_tail.py` times tails alone: on the device (many of them in one CUDA graph), and what the host
takes to launch one. `python benchmarks/gpu_tail.py --step 1B` measures whole steps besides: sampling, beams and chains
of processors beside greedy steps; with `--profile` it prints what they launch, their kernels and the host's calls.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import pstats
import statistics
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from gpu_step import COMMON, SAMPLING, make_model, measure, time_step  # benchmarks/gpu_step.py

import unspool
from unspool.decoding.randomness import Uniforms, draw_uniform
from unspool.decoding.select import draw, draw_plainly, take_likeliest
from unspool.decoding.tails import draw_by_kernels, draw_by_operators
from unspool.logits.fused import split_tail

REPEATS = 20  # of a tail in one graph


def make_scores(kind: str, rows: int, vocab: int) -> torch.Tensor:
    """Logits as random weights leave them, as a sure model does, or with more ties than the kernel has room for."""
    scores = torch.randn(rows, vocab, device="cuda") * 2
    if kind == "sure":
        scores[:, ::1000] += 10.0
    elif kind == "ties":
        scores = scores.round()
    return scores


def find_ways(scores: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """Everything that is timed."""
    ids = torch.zeros(scores.shape[0], 1, dtype=torch.int64, device="cuda")
    seeds = torch.arange(scores.shape[0], device="cuda")
    uniforms = draw_uniform(seeds, seeds)
    temperature, top_k, top_p = (
        unspool.TemperatureLogitsWarper(0.8),
        unspool.TopKLogitsWarper(50),
        unspool.TopPLogitsWarper(0.9),
    )
    _, tail = split_tail(unspool.LogitsProcessorList([temperature, top_k, top_p]))
    _, many = split_tail(unspool.LogitsProcessorList([temperature, unspool.TopKLogitsWarper(1000), top_p]))
    assert tail is not None and many is not None
    head = unspool.LogitsProcessorList([temperature, top_p])
    return {
        "greedy": lambda: take_likeliest(scores),
        "kernels": lambda: draw_by_kernels(tail, scores, uniforms),
        "operators": lambda: draw_by_operators(tail, scores, uniforms),
        "kernels, top-k 1,000": lambda: draw_by_kernels(many, scores, uniforms),
        "operators, top-k 1,000": lambda: draw_by_operators(many, scores, uniforms),
        "temperature alone": lambda: draw(temperature(ids, scores), uniforms),
        "the same by operators": lambda: draw_plainly(temperature(ids, scores), uniforms),
        "top-p without top-k": lambda: draw(head(ids, scores), uniforms),
    }


def time_on_device(function: Callable[[], Any]) -> float:
    """Microseconds of a call inside a graph of many."""
    function()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REPEATS):
            function()
    return measure(graph.replay) / REPEATS * 1e3


def time_on_host(function: Callable[[], Any]) -> float:
    """Microseconds that the host takes to launch a call, with nothing to wait for."""
    times = []
    for _ in range(30):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(10):
            function()
        times.append((time.perf_counter() - started) / 10 * 1e6)
    return statistics.median(times)


def list_kernels(function: Callable[[], Any]) -> list[str]:
    """A line for each kernel of a call, with its microseconds."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(10):
            function()
        torch.cuda.synchronize()
    events = sorted(profile.key_averages(), key=lambda one: -one.device_time_total)
    return [f"{one.device_time_total / 10:8.2f} us {one.count / 10:5.1f} times  {one.key[:90]}" for one in events]


def time_tails(rows: int, vocab: int, kind: str) -> None:
    """Print what every way takes."""
    print(f"\n{rows} rows, vocabulary {vocab}, {kind}: microseconds on the device, on the host", flush=True)
    for name, function in find_ways(make_scores(kind, rows, vocab)).items():
        try:
            print(f"{name:>26} {time_on_device(function):9.1f} {time_on_host(function):9.1f}", flush=True)
        except Exception as error:  # a call that can't be captured must not end the run
            torch.cuda.synchronize()
            print(f"{name:>26} {error!r:.120}", flush=True)


CHAIN = {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "typical_p": 0.9, "min_p": 0.05}
DRAWN = {"do_sample": True, "top_k": 0, "seed": 1}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": SAMPLING,
    "temperature": {**DRAWN, "temperature": 0.8},
    "top-p": {**DRAWN, "temperature": 0.8, "top_p": 0.9},
    "penalty": {"repetition_penalty": 1.2},
    "n-grams": {"no_repeat_ngram_size": 3},
    "typical": {**DRAWN, "typical_p": 0.9},
    "min-p": {**DRAWN, "min_p": 0.05},
    "eta": {**DRAWN, "eta_cutoff": 3e-4},
    "epsilon": {**DRAWN, "epsilon_cutoff": 3e-4},
    "chain": {**DRAWN, **CHAIN},
    "chain, top-k 50": {**DRAWN, **CHAIN, "top_k": 50},
    "beams": {"num_beams": 4},
    "beams, penalty": {"num_beams": 4, "repetition_penalty": 1.2, "no_repeat_ngram_size": 3},
    "beam samples": {"num_beams": 4, **DRAWN, "top_k": 50},
}


def count_step(model: Any, title: str, run: str, names: list[str], profiled: list[str], rounds: int) -> None:
    """Print what steps take in alternating rounds, and what those that are `profiled` launch."""
    batch, context = map(int, run.split("x"))
    ids = torch.randint(1, 1000, (batch, context), device="cuda")

    def generate(count: int, more: dict[str, Any]) -> None:
        unspool.generate(model, ids, max_new_tokens=count, **{**COMMON, **more})

    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in names:
            times[name].append(time_step(lambda count, more=WAYS[name]: generate(count, more), 16, 144, rounds=2))
    print(f"\n{title} {run}: ms a step, the least and the median of {rounds} rounds; over greedy steps", flush=True)
    best = {name: (min(taken), statistics.median(taken)) for name, taken in times.items()}
    least_of_all, middle_of_all = best.get("greedy", (float("nan"), float("nan")))
    for name, (least, middle) in best.items():
        ratios = f"{least / least_of_all:.3f} {middle / middle_of_all:.3f}"
        print(f"{name:>26} {least:7.3f} {middle:7.3f}   {ratios}", flush=True)
    for name in profiled:
        profile_step(name, lambda count, more=WAYS[name]: generate(count, more))


def profile_step(name: str, generate: Callable[[int], None]) -> None:
    """Print what a step launches, its kernels by their time, and the host's calls."""
    found: list[tuple[Counter[str], Counter[str]]] = []
    for count in (20, 52):
        with torch.profiler.profile() as profile:
            generate(count)
            torch.cuda.synchronize()
        events = profile.key_averages()
        on_device = {one.key: one.self_device_time_total for one in events if one.self_device_time_total}
        found.append((Counter({one.key: one.count for one in events}), Counter(on_device)))
    counts, spent = (Counter({key: many[key] - few[key] for key in many}) for few, many in zip(*found, strict=True))
    rest = [f"{key[:60]} {number / 32:.2f}" for key, number in counts.most_common() if number >= 4]
    print(f"\n{name}, a step: " + "; ".join(rest), flush=True)
    for key, taken in spent.most_common(24):
        print(f"{taken / 32:9.2f} us {counts[key] / 32:6.1f} times  {key[:90]}", flush=True)
    host, text = cProfile.Profile(), io.StringIO()
    host.runcall(generate, 112)
    pstats.Stats(host, stream=text).sort_stats("tottime").print_stats(24)
    print(text.getvalue()[:4_000], flush=True)


@torch.no_grad()
def main() -> None:
    """Print all of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--vocab", type=int, default=128_256)
    parser.add_argument("--kinds", nargs="+", default=["spread", "sure", "ties"])
    parser.add_argument("--step", nargs="*", default=[], help="shapes whose whole steps are measured and counted")
    parser.add_argument("--run", nargs="+", default=["1x256"], help="batch x context of these")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), help="what is measured of them")
    parser.add_argument("--profile", nargs="*", default=[], help="ways whose steps are looked into")
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for shape in options.step:
        model = make_model(shape)
        for run in options.run:
            count_step(model, shape, run, options.ways, options.profile, options.rounds)
    if options.step:
        return
    for rows in options.rows:
        for kind in options.kinds:
            time_tails(rows, options.vocab, kind)
    ways = find_ways(make_scores("spread", 1, options.vocab))
    for name in ("kernels", "operators"):
        print(f"\n{name}, one row:")
        print("\n".join(list_kernels(ways[name])))
    table, seeds = Uniforms(), torch.arange(1, device="cuda")
    positions = iter(range(10**9))
    print(f"\na step's number: {time_on_host(lambda: table.take(seeds, [next(positions)])):.1f} us on the host")


if __name__ == "__main__":
    main()
