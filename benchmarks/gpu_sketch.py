"""Greedy steps on a GPU with and without a sketch of the head, and with and without kernels for small matrices.

    python benchmarks/gpu_sketch.py [--models Llama-3.2-1B bart-large SmolLM2-135M …] [--rows 1 4 32] [--new 64]

Models are those of `families.py` and `gpu_pairs.py`, with random weights in bfloat16: heads of random weights leave
more tokens to compare than trained ones. A step's time is that of its graph, replayed 48 times; the least of six
rounds in which the ways take turns. Sources of encoder-decoders have 512 tokens.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from typing import Any

import torch
from families import SHAPES as DECODERS  # benchmarks/families.py
from families import draw_weights, make_reference
from gpu_pairs import SHAPES as PAIRS  # benchmarks/gpu_pairs.py
from gpu_pairs import draw_source, make

import unspool
from unspool.models.paths import captured_fused
from unspool.models.registry import build_model
from unspool.models.weights import MemorySource

PROMPT, BEGIN, REPLAYS, ROUNDS = 16, 4, 48, 6
WAYS = {"plain": (False, False), "sketch": (True, False), "small": (False, True), "both": (True, True)}


def load(name: str) -> Any:
    """A model of a name."""
    if name in PAIRS:
        return make(name)[0]
    reference = make_reference(name, "meta")
    source = MemorySource(draw_weights(reference))
    return build_model(reference.config.to_dict(), source, device=torch.device("cuda"), dtype=torch.bfloat16)


@contextmanager
def use(path: Any, *, sketches: bool, is_small: bool) -> Iterator[None]:
    """Inside it new steps are captured in one of the ways."""
    held = captured_fused.SMALL_ROWS
    path._may_sketch = sketches
    if not is_small:
        captured_fused.SMALL_ROWS = range(0)
    try:
        yield
    finally:
        captured_fused.SMALL_ROWS = held


def time_graph(step: Any, rows: int) -> float:
    """Microseconds of a captured step."""
    step._send_lengths([BEGIN] * rows)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(4):
        step._graph.replay()
    begin.record()
    for _ in range(REPLAYS):
        step._graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / REPLAYS * 1e3


def measure(name: str, model: Any, rows: int, new: int) -> None:
    """Print the times of one number of rows."""
    path = model.find_path("captured")
    given = {"inputs": torch.randint(5, 30_000, (rows, PROMPT), device="cuda")}
    if name in PAIRS:
        given = draw_source(model, rows, 512)
    path._waiting.clear()
    path._sketch = None
    steps, texts = {}, {}
    for way, (sketches, is_small) in [*WAYS.items()] * 2:  # all are captured before the caches that stay are taken
        if way in steps:
            path._waiting = {steps[way][0]: [steps[way][1]]}
        with use(path, sketches=sketches, is_small=is_small):
            asked = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None}
            texts[way] = unspool.generate(model, **given, **asked)
        found = [(key, step) for key, held in path._waiting.items() for step in held if key[0].is_sketched == sketches]
        if found:
            steps[way] = found[-1]
        path._waiting = {}
    least = dict.fromkeys(steps, float("inf"))
    with torch.inference_mode():
        for _ in range(ROUNDS):
            for way, (_, step) in steps.items():
                least[way] = min(least[way], time_graph(step, rows))
    count = 0 if path._sketch is None else path._sketch._count.item() / (2 * 2 * rows * new)
    equal = {way: float((text == texts["plain"]).float().mean()) for way, text in texts.items()}
    cells = ", ".join(f"{way} {took:.1f} ({equal[way]:.3f})" for way, took in least.items())
    print(f"{name:>16} {rows:>3} rows: {cells}; {count:.0f} tokens compared a row", flush=True)


@torch.no_grad()
def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=[*PAIRS, *DECODERS], choices=[*PAIRS, *DECODERS])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 32])
    parser.add_argument("--new", type=int, default=64)
    options = parser.parse_args()
    print(f"{date.today()} · {torch.cuda.get_device_name()} · torch {torch.__version__} · µs a step (tokens as plain)")
    for name in options.models:
        model = load(name)
        for rows in options.rows:
            measure(name, model, rows, options.new)
        del model
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
