"""Which kernels a captured step spends its time in: `python benchmarks/gpu_profile.py --shape 1B --run 1x256`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from gpu_step import make_config, make_weights  # benchmarks/gpu_step.py

from unspool.models.registry import build_model
from unspool.models.weights import MemorySource
from unspool.protocols import Forward, Want


def profile_step(model: Any, batch: int, context: int, new: int = 1, most: int = 14) -> None:
    """Print a captured pass's time, and its kernels by the time that they take."""
    cache = model.new_cache("dynamic", batch, context + 64 * new)
    want = Want(logits="all" if new > 1 else "last")
    model.forward(torch.randint(0, 1000, (batch, context), device="cuda"), cache)
    tokens = torch.randint(0, 1000, (batch, new), device="cuda")
    profile_passes(lambda: model.forward(tokens, cache, want=want), f"{batch}x{context} x {new}", most)


def profile_passes(run: Callable[[], Forward], name: str, most: int) -> None:
    """Print what a pass takes if it is run again and again, and its kernels by the time that they take."""
    for _ in range(5):
        path = run().path
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(20):
        run()
    end.record()
    torch.cuda.synchronize()
    print(f"{name} {path}: {begin.elapsed_time(end) / 20:.4f} ms a forward pass")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(5):
            run()
        torch.cuda.synchronize()
    for event in sorted(profile.key_averages(), key=lambda one: -one.device_time_total)[:most]:
        total, count = event.device_time_total / 5, event.count / 5
        print(f"{total:9.1f} us {count:6.1f} times {total / count:8.2f} us each  {event.key[:90]}")


@torch.no_grad()
def main() -> None:
    """Profile one step of a shape of Llama's."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="1B")
    parser.add_argument("--run", default="1x256", help="batch x context")
    parser.add_argument("--new", type=int, default=1, help="tokens a row: more than one are drafts that are checked")
    options = parser.parse_args()
    batch, context = map(int, options.run.split("x"))
    config = make_config(options.shape)
    model = build_model(
        config, MemorySource(make_weights(config)), is_gguf=False, device=torch.device("cuda"), dtype=torch.bfloat16
    )
    print(options.shape, end=" ")
    profile_step(model, batch, context, options.new)


if __name__ == "__main__":
    main()
