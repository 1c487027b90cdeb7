"""Reading prompts on a GPU beside the card's matrix peak: `python benchmarks/gpu_prompts.py --shape 8B --profile`.

Random weights in bfloat16. The peak is what torch's product of two square bfloat16 matrices reaches in the same run.
Operations are those of the layers' products, of attention (half of its square, as it is causal) and of the head for
the last token of each row; `--profile` prints where the time goes.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
from gpu_step import make_config, make_model  # benchmarks/gpu_step.py


def time_passes(run: Callable[[], object], rounds: int) -> float:
    """The median of a pass's seconds on the device."""
    times = []
    for _ in range(rounds + 1):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times[1:])


def measure_peak(size: int = 8192) -> float:
    """Operations a second of a product of square matrices."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / time_passes(lambda: a @ b, 20)


def count_operations(config: dict[str, Any], batch: int, context: int) -> float:
    """Multiplications and additions of a pass over whole prompts."""
    hidden, ffn, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    kv = hidden // heads * config["num_key_value_heads"]
    layer = hidden * (2 * hidden + 2 * kv + 3 * ffn)
    attention = 2 * hidden * context / 2  # scores and sums, over half of the keys
    tokens = batch * context * config["num_hidden_layers"] * (layer + attention)
    return 2.0 * (tokens + batch * hidden * config["vocab_size"])


def profile_pass(run: Callable[[], object], most: int) -> None:
    """Print a pass's kernels by the time that they take."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    events = sorted(profile.key_averages(), key=lambda one: -one.device_time_total)
    total = sum(event.device_time_total for event in events)
    for event in events[:most]:
        print(f"{event.device_time_total / total:7.1%} {event.count:6} times  {event.key[:100]}", flush=True)


@torch.no_grad()
def main() -> None:
    """Print a line for each batch and context."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="8B")
    parser.add_argument("--runs", nargs="+", default=["1x8192", "64x1024"], help="batch x context")
    parser.add_argument("--quantize", choices=["int8", "int4", "fp8"], help="weights of so many bits")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    config = make_config(options.shape)
    model = make_model(options.shape, options.quantize)
    peak = measure_peak()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, peak {peak / 1e12:.0f} TFLOP/s", flush=True)
    for run in options.runs:
        batch, context = map(int, run.split("x"))
        tokens = torch.randint(0, 1000, (batch, context), device="cuda")

        def read(tokens: torch.Tensor = tokens) -> None:
            model.forward(tokens, model.new_cache("dynamic", tokens.shape[0], tokens.shape[1] + 8))

        took = time_passes(read, options.rounds)
        rate = count_operations(config, batch, context) / took
        kept = options.quantize or "bf16"
        print(
            f"{options.shape} {kept} {run}: {took * 1e3:.1f} ms, {batch * context / took:,.0f} tokens/s, "
            f"{rate / 1e12:.0f} TFLOP/s ({rate / peak:.2f} of the peak)",
            flush=True,
        )
        if options.profile:
            profile_pass(read, 14)


if __name__ == "__main__":
    main()
