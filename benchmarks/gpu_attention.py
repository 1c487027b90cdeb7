"""Tilings of a step's attention, measured inside whole captured passes: `python benchmarks/gpu_attention.py`.

In a pass a kernel overlaps with its neighbours, so the time of the whole pass is what counts.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from typing import Any

import torch
from gpu_step import make_model

from unspool.kernels.gpu.attention import step_attention as attention
from unspool.kernels.gpu.attention.step_tilings import AttentionTiling


@torch.inference_mode()
def time_pass(model: Any, rows: int, contexts: list[int]) -> list[float]:
    """Microseconds of a pass, for each context."""
    model.find_path("captured")._waiting.clear()
    cache = model.new_cache("static", rows, max(contexts) + 64)
    model.forward(torch.zeros(rows, 16, dtype=torch.int64, device="cuda"), cache)
    token = torch.zeros(rows, 1, dtype=torch.int64, device="cuda")
    for _ in range(2):
        model.forward(token, cache)
    step = next(iter(model.find_path("captured")._waiting.values()))[0]
    found = []
    for context in contexts:
        times = []
        for _ in range(5):
            step._send_lengths([context] * rows)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(10):
                step._graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) * 1e2)
        found.append(statistics.median(times))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=["1B", "8B"], default="8B")
    parser.add_argument("--packing", choices=["int4", "int8"], help="quantised weights")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--contexts", type=int, nargs="+", default=[256, 1024, 4096, 16384])
    parser.add_argument("--blocks", type=int, nargs="*", default=[32, 64, 128])
    parser.add_argument("--chunks", type=int, nargs="+", default=[32, 64, 128, 256])
    parser.add_argument("--programs", type=int, nargs="+", default=[128, 256])
    parser.add_argument("--warps", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 3])
    arguments = parser.parse_args()
    model = make_model(arguments.shape, arguments.packing)
    choose = attention.choose_tiling
    print("block chunk programs warps stages |", " ".join(f"{context:>8}" for context in arguments.contexts))
    print(f"{'as built in':33s} |", " ".join(f"{t:8.0f}" for t in time_pass(model, arguments.rows, arguments.contexts)))
    for block, chunk, programs, warps, stages in itertools.product(
        arguments.blocks, arguments.chunks, arguments.programs, arguments.warps, arguments.stages
    ):
        if chunk < block:
            continue
        tiling = AttentionTiling(block, chunk, programs, warps, stages)
        attention.choose_tiling = lambda _, __, tiling=tiling: tiling  # the same for all
        times = time_pass(model, arguments.rows, arguments.contexts)
        sizes = f"{block:5d} {chunk:5d} {programs:8d} {warps:5d} {stages:6d}"
        print(f"{sizes} |", " ".join(f"{each:8.0f}" for each in times), flush=True)
    attention.choose_tiling = choose


if __name__ == "__main__":
    main()
