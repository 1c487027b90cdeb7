"""The cost of sampling after the logits, and the launches of a sampling step compared with a greedy one.

`python benchmarks/gpu_tail.py` times tails alone: on the device (many of them in one CUDA graph), and what the host
takes to launch one. `python benchmarks/gpu_tail.py --step 1B` counts kernels and operators of whole steps besides.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from gpu_step import COMMON, SAMPLING, make_config, make_weights, measure, time_step  # benchmarks/gpu_step.py

import unspool
from unspool.decoding.randomness import Uniforms, draw_uniform
from unspool.decoding.select import draw, draw_plainly, take_likeliest
from unspool.decoding.tails import draw_by_kernels, draw_by_operators
from unspool.logits.fused import split_tail
from unspool.models.registry import build_model
from unspool.models.weights import MemorySource

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


def count_step(shape: str, run: str) -> None:
    """Print what a step launches, greedy and sampling, and what both take in one run of alternating rounds."""
    config = make_config(shape)
    model = build_model(
        config, MemorySource(make_weights(config)), is_gguf=False, device=torch.device("cuda"), dtype=torch.bfloat16
    )
    batch, context = map(int, run.split("x"))
    ids = torch.randint(1, 1000, (batch, context), device="cuda")
    ways: dict[str, dict[str, Any]] = {
        "greedy": {},
        "sampling": SAMPLING,
        "temperature alone": {"do_sample": True, "temperature": 0.8, "top_k": 0, "seed": 1},
        "top-p without top-k": {"do_sample": True, "temperature": 0.8, "top_k": 0, "top_p": 0.9, "seed": 1},
    }

    def generate(count: int, more: dict[str, Any]) -> None:
        unspool.generate(model, ids, max_new_tokens=count, **{**COMMON, **more})

    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(4):
        for name, more in ways.items():
            times[name].append(time_step(lambda count, more=more: generate(count, more), 16, 144, rounds=2))
    print(f"\n{shape} {run}: ms a step, the least and the median of four rounds; greedy over it")
    best = {name: (min(taken), statistics.median(taken)) for name, taken in times.items()}
    for name, (least, middle) in best.items():
        ratios = (best["greedy"][0] / least, best["greedy"][1] / middle)
        print(f"{name:>26} {least:7.3f} {middle:7.3f}   {ratios[0]:.3f} {ratios[1]:.3f}", flush=True)
    for name in ("greedy", "sampling"):
        counts: list[Counter[str]] = []
        for count in (20, 52):
            with torch.profiler.profile() as profile:
                generate(count, ways[name])
                torch.cuda.synchronize()
            counts.append(Counter({one.key: one.count for one in profile.key_averages()}))
        counts[1].subtract(counts[0])
        rest = [f"{key[:60]} {number / 32:.2f}" for key, number in counts[1].most_common() if number >= 4]
        print(f"{name}, a step: " + "; ".join(rest), flush=True)


@torch.no_grad()
def main() -> None:
    """Print all of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--vocab", type=int, default=128_256)
    parser.add_argument("--kinds", nargs="+", default=["spread", "sure", "ties"])
    parser.add_argument("--step", nargs="*", default=[], help="shapes whose whole steps are measured and counted")
    parser.add_argument("--run", default="1x256", help="batch x context of these")
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
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
    for shape in options.step:
        count_step(shape, options.run)


if __name__ == "__main__":
    main()
