"""Beam search of large shapes on a GPU beside transformers: `python benchmarks/gpu_beams.py --shapes 1B 8B`.

Random weights in bfloat16, 4 beams, 128 new tokens, taken in turns. The floor is the time of the forward passes alone;
memory is the most that a call took beyond the weights.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from floor import run_forwards  # benchmarks/floor.py
from gpu_step import build_native, make_config, make_reference, make_weights  # benchmarks/gpu_step.py

import unspool


def measure(runs: dict[str, Callable[[], object]], rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    """Median seconds of each in turns, and the most memory (GB) beyond what was there; a first turn is not counted."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    peaks: dict[str, float] = {}
    for turn in range(rounds + 1):
        for name, run in runs.items():
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            started = time.perf_counter()
            run()
            torch.cuda.synchronize()
            if turn:
                times[name].append(time.perf_counter() - started)
                peaks[name] = (torch.cuda.max_memory_allocated() - before) / 1e9
    return {name: statistics.median(taken) for name, taken in times.items()}, peaks


@torch.no_grad()
def main() -> None:
    """Print a row for each shape, batch and prompt."""
    import transformers

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["1B"])
    parser.add_argument("--runs", nargs="+", default=["1x512", "8x512", "1x2048"], help="batch x prompt")
    parser.add_argument("--beams", type=int, default=4)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    common = {"num_beams": options.beams, "max_new_tokens": options.new, "eos_token_id": None, "pad_token_id": 0}
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, transformers {transformers.__version__}, bf16")
    print(
        f"{'shape':>6}{'run':>8}{'unspool s':>11}{'theirs s':>10}{'ratio':>8}{'floor s':>9}{'of floor':>10}"
        f"{'peak GB':>9}{'theirs':>8}{'share':>7}"
    )
    for shape in options.shapes:
        config, weights = make_config(shape), make_weights(make_config(shape))
        model = build_native(config, weights)
        reference = make_reference(config, weights)
        for run in options.runs:
            batch, prompt = map(int, run.split("x"))
            ids = torch.randint(1, 1000, (batch, prompt), device="cuda")
            mask = torch.ones_like(ids)
            runs: dict[str, Callable[[], object]] = {
                "ours": lambda ids=ids, model=model: unspool.generate(model, ids, **common),
                "theirs": lambda ids=ids, mask=mask, reference=reference: reference.generate(
                    ids, attention_mask=mask, do_sample=False, **common
                ),
                "floor": lambda ids=ids, model=model: run_forwards(model, ids, options.beams, options.new),
            }
            taken, peaks = measure(runs, options.rounds)
            ours, theirs, floor = taken["ours"], taken["theirs"], taken["floor"]
            print(
                f"{shape:>6}{run:>8}{ours:>11.2f}{theirs:>10.2f}{theirs / ours:>7.2f}x"
                f"{floor:>9.2f}{ours / floor:>9.2f}x"
                f"{peaks['ours']:>9.2f}{peaks['theirs']:>8.2f}{peaks['ours'] / peaks['theirs']:>7.0%}"
            )
        del model, reference, weights
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
