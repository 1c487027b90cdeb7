"""Memory of a SinkCache over very many tokens: the cache's bytes and the program's, as it generates.

python benchmarks/sink_memory.py                    # 100,000 tokens
python benchmarks/sink_memory.py --tokens 3000      # a smoke run

The model is a tiny one with random weights: how much a cache holds does not depend on what is said.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from gpu_step import make_model  # benchmarks/gpu_step.py

import unspool
from cache import TINY, _config


def main() -> None:
    """Generate, and print a line for every tenth of the tokens."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--window", type=int, default=1024)
    arguments = parser.parse_args()
    config = _config(TINY, 2048, windowed=False)
    model = make_model(config, device="cpu", dtype=torch.float32)
    cache = unspool.SinkCache(arguments.window, 4)
    print(f"{'tokens':>8} {'cache KiB':>10} {'program MiB':>12} {'tokens/s':>9}")
    started = time.perf_counter()
    stream = unspool.stream(
        model,
        torch.randint(3, 1024, (1, 16)),
        max_new_tokens=arguments.tokens,
        do_sample=True,
        seed=0,
        eos_token_id=None,
        past_key_values=cache,
    )
    for done, _ in enumerate(stream, start=1):
        if done % max(1, arguments.tokens // 10) == 0:
            rate = done / (time.perf_counter() - started)
            print(f"{done:>8} {cache.nbytes / 1024:>10.1f} {_find_resident():>12.1f} {rate:>9.0f}", flush=True)


def _find_resident() -> float:
    """MiB of memory that the program holds now."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) / 1024


if __name__ == "__main__":
    main()
