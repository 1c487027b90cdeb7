"""Attention of one decoding step over packed keys beside plain bfloat16 ones, on a GPU.

    python benchmarks/gpu_packed.py [--contexts 1024 8192 32768 131072] [--batches 1 8] [--bits 2 4 8] [--rounds 50]

The 8B shape (32 heads, 8 key heads, width 128), one layer. Plain is torch's attention over the keys as they lie in a
dynamic cache. Times are medians of CUDA events in one interleaved run; bytes are those of keys and values.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch

from unspool.cache import DynamicCache, QuantizedCache, QuantizedCacheConfig
from unspool.kernels.attention import attend
from unspool.kernels.packed import attend_packed

HEADS, KV_HEADS, WIDTH = 32, 8, 128


def time_one(run: Callable[[], object]) -> float:
    """Milliseconds of one call on the device."""
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    run()
    last.record()
    torch.cuda.synchronize()
    return float(first.elapsed_time(last))


def main() -> None:
    """Run and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 8192, 32768, 131072])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--bits", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    print("| batch | context | bits | bytes, of bf16 | plain ms | packed ms | speed, of plain |")
    print("|---|---|---|---|---|---|---|")
    for rows in options.batches:
        for context in options.contexts:
            compare(rows, context, options.bits, options.rounds, options.device)


def compare(rows: int, context: int, bits: list[int], rounds: int, device: str) -> None:
    """One context: the plain cache, and each number of bits beside it."""
    kv = torch.randn(rows, context, 2, KV_HEADS, WIDTH, device=device, dtype=torch.bfloat16)
    new = torch.randn(rows, 1, 2, KV_HEADS, WIDTH, device=device, dtype=torch.bfloat16)
    queries = torch.randn(rows, HEADS, 1, WIDTH, device=device, dtype=torch.bfloat16)
    plain = DynamicCache(capacity=context + 1)
    plain.begin(rows, context, device=device)
    plain.write(0, kv)
    plain.end()
    plain.begin(rows, 1, device=device)
    plain_keys = plain.write(0, new)
    for nbits in bits:
        cache = QuantizedCache(QuantizedCacheConfig("HQQ", nbits=nbits, axis_value=1), capacity=context)
        cache.begin(rows, context, device=device)
        cache.write(0, kv)
        cache.end()
        cache.begin(rows, 1, device=device)
        packed_keys = cache.write(0, new)
        runs: list[Callable[[], object]] = [
            lambda keys=plain_keys: attend(queries, *keys, scale=WIDTH**-0.5),
            lambda keys=packed_keys: attend_packed(queries, *keys, scale=WIDTH**-0.5),
        ]
        for run in runs:
            time_one(run)
        times = [[time_one(run) for run in runs] for _ in range(rounds)]
        mine, theirs = (statistics.median(each) for each in zip(*times, strict=True))
        share = cache.nbytes / (2 * rows * context * KV_HEADS * WIDTH * 2)
        print(
            f"| {rows} | {context} | {nbits} | {share:.3f} | {mine:.3f} | {theirs:.3f} | {mine / theirs:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
