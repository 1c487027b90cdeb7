"""Attention of one decoding step over packed keys beside plain bfloat16 ones, on a GPU.

    python benchmarks/gpu_packed.py [--contexts 1024 8192 32768 131072] [--batches 1 8] [--bits 2 4 8] [--rounds 50]
    python benchmarks/gpu_packed.py --step [--contexts 8192 32768] [--batches 1 8]

With `--step` the kernels of captured steps, in CUDA graphs over several layers: 4 bits in some tilings, plain ones
beside them, and the error of what is read against float64. The 8B shape (32 heads, 8 key heads, width 128). Otherwise
one layer; plain is torch's attention over the keys as they lie in a dynamic cache. Times are medians of CUDA events in
one interleaved run; bytes are those of keys and values.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial

import torch
from gpu_tilings import time_graph  # benchmarks/gpu_tilings.py

from unspool.cache import DynamicCache, QuantizedCache, QuantizedCacheConfig
from unspool.kernels.attention import attend
from unspool.kernels.gpu.attention.packed_attention import USUAL, PackedStepAttention, PackedTiling, list_packed
from unspool.kernels.gpu.attention.split_attention import HeadShape
from unspool.kernels.gpu.attention.step_attention import StepAttention
from unspool.kernels.packed import attend_packed
from unspool.kernels.packing import Packed, Scheme, pack, unpack

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
    parser.add_argument("--step", action="store_true", help="the kernels of captured steps")
    options = parser.parse_args()
    if options.step:
        for rows in options.batches:
            for context in options.contexts:
                compare_steps(rows, context)
        return
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


def make_layer(rows: int, context: int) -> tuple[list[Packed], torch.Tensor]:
    """Packed keys and values, and room for those that are not."""
    schemes = [Scheme.of(WIDTH, 4, 64, by_channel, torch.float16) for by_channel in (True, False)]
    both = [pack(torch.randn(rows, KV_HEADS, context, WIDTH, device="cuda"), scheme) for scheme in schemes]
    packed = [Packed(one.scheme, *(tensor.contiguous() for tensor in one.tensors())) for one in both]
    return packed, torch.randn(rows, 256, 2, KV_HEADS, WIDTH, device="cuda", dtype=torch.bfloat16)


def read_exactly(qkv: torch.Tensor, packed: list[Packed], recent: torch.Tensor, num_packed: int) -> torch.Tensor:
    """The first row's attention output in float64."""
    new = qkv[0].double().view(HEADS + 2 * KV_HEADS, 1, WIDTH)
    both = []
    for which, one in enumerate(packed):
        old = unpack(one, torch.float32)[0, :, :num_packed].double()
        own = recent[0, :128, which].double().transpose(0, 1)
        latest = new[HEADS + which * KV_HEADS : HEADS + (which + 1) * KV_HEADS]
        both.append(torch.cat((old, own, latest), 1).repeat_interleave(HEADS // KV_HEADS, 0))
    weights = ((new[:HEADS] @ both[0].transpose(1, 2)) * WIDTH**-0.5).softmax(-1)
    return (weights @ both[1]).view(-1)


def compare_steps(rows: int, context: int, num_layers: int = 8) -> None:
    """Microseconds per layer of the captured steps' kernels."""
    shape = HeadShape(HEADS, KV_HEADS, WIDTH, WIDTH**-0.5)
    device, context = torch.device("cuda"), context // 64 * 64
    num_packed = context - 128
    layers = [make_layer(rows, context) for _ in range(num_layers)]
    schemes = (layers[0][0][0].scheme, layers[0][0][1].scheme)
    base = torch.zeros(16, device=device, dtype=torch.bfloat16)
    recent = [(own.data_ptr() - base.data_ptr()) // 16 for _, own in layers]
    tensors = [(*packed[0].tensors(), *packed[1].tensors()) for packed, _ in layers]
    table = torch.tensor([*recent, 256, *list_packed(base, tensors, context, [num_packed] * rows)], device=device)
    lengths = torch.full((rows,), context, dtype=torch.int32, device=device)
    qkv = torch.randn(rows, (HEADS + 2 * KV_HEADS) * WIDTH, device=device).to(torch.bfloat16)
    out = torch.empty(rows, HEADS * WIDTH, device=device, dtype=torch.bfloat16)
    turns = torch.stack((torch.ones(rows, WIDTH // 2), torch.zeros(rows, WIDTH // 2)), 1).to(device)
    expected = read_exactly(qkv, layers[0][0], layers[0][1], num_packed)
    for tiling in (USUAL, PackedTiling(384, 4, 3, 168), PackedTiling(384, 4, 2, 168), PackedTiling(512, 4, 3, 128)):
        step = PackedStepAttention(rows, shape, schemes, device, tiling)
        run = partial(step, qkv, out, base, table, lengths, turns=turns)
        run(0, num_layers)
        error = float((out[0].double() - expected).norm() / expected.norm())
        took = time_graph(lambda run=run: [run(layer, num_layers) for layer in range(num_layers)], 3) / num_layers
        print(f"packed, batch {rows}, {context}: {took:7.1f} us a layer, error {error:.1e}, {tiling}", flush=True)
    kept = [torch.randn(rows, context + 8, 2, KV_HEADS, WIDTH, device=device, dtype=torch.bfloat16) for _ in range(4)]
    table = torch.tensor([*((one.data_ptr() - kept[0].data_ptr()) // 16 for one in kept), context + 8], device=device)
    plain = StepAttention(rows, shape, device)
    took = time_graph(lambda: [plain(qkv, out, kept[0], table, lengths, i, 4, turns=turns) for i in range(4)], 3) / 4
    print(f"plain,  batch {rows}, {context}: {took:7.1f} us a layer", flush=True)


if __name__ == "__main__":
    main()
