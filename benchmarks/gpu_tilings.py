"""How to cut the products and the attention of a step on this GPU: `python benchmarks/gpu_tilings.py`.

Every tiling is timed inside a CUDA graph over as many distinct matrices as outgrow the cache. `--save` keeps what it
finds for later processes; what an H200 gave is in `kernels/gpu/products/tilings.py`.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import statistics
import sys
from typing import Any

import torch
import torch.nn.functional as F

from unspool.kernels.gpu.attention.split_attention import HeadShape
from unspool.kernels.gpu.attention.step_attention import StepAttention
from unspool.kernels.gpu.attention.step_tilings import AttentionTiling
from unspool.kernels.gpu.products.activations import CODES
from unspool.kernels.gpu.products.nibble_product import NibbleTiling, multiply_nibbles
from unspool.kernels.gpu.products.row_product import RowTiling, multiply_row
from unspool.kernels.gpu.products.tilings import write_measured
from unspool.kernels.gpu.products.words import Words
from unspool.kernels.gpu.products.words_product import WordsTiling, multiply_words

# name: (outputs, inputs, what stands around the product)
PRODUCTS = {
    "1B qkv": (3072, 2048, "norm"),
    "1B out": (2048, 2048, "adds"),
    "1B up": (16384, 2048, "gated"),
    "1B down": (2048, 8192, "adds"),
    "1B head": (128256, 2048, "head"),
    "8B qkv": (6144, 4096, "norm"),
    "8B out": (4096, 4096, "adds"),
    "8B up": (28672, 4096, "gated"),
    "8B down": (4096, 14336, "adds"),
    "8B head": (128256, 4096, "head"),
}
# bits a number takes, its factors counted; "halves" and "bytes" are two ways of one row of int4
BITS = {None: 16, "int4": 5, "int8": 8.5, "halves": 5, "bytes": 5}
NIBBLES = ("halves", "bytes")

# width, rows, keys, layers
ATTENTIONS = [
    (128, 1, 256, 32),
    (128, 1, 4096, 32),
    (128, 8, 1024, 32),
    (128, 64, 1024, 8),
    (64, 1, 256, 16),
    (64, 1, 1024, 16),
]


def list_row_tilings(manner: str, inputs: int) -> list[RowTiling]:
    """Tilings for one row that are worth a try."""
    found = []
    for rows, columns, warps, early in itertools.product(
        (1, 2, 4, 8, 16), (512, 1024, 2048, 4096), (2, 4, 8), (True, False)
    ):
        each = rows * columns * (2 if manner == "gated" else 1) / (32 * warps)
        if 16 <= each <= 128 and columns <= inputs:
            parts = -(-inputs // columns)
            aheads = {1, parts} if each * parts <= 160 else {1}  # whole rows before the input is there, if they fit
            found += [RowTiling(rows, columns, warps, early, ahead) for ahead in sorted(aheads)]
    return found


def list_few_tilings(manner: str, inputs: int, num_rows: int, kind: str | None) -> list[Any]:
    """Tilings for a few rows, of plain or quantised numbers, that are worth a try."""
    matrices = 2 if manner == "gated" else 1
    if kind is None:
        found = []
        for rows, columns, warps in itertools.product((2, 4, 8), (512, 1024, 2048), (2, 4, 8)):
            each = rows * columns * matrices * num_rows / (32 * warps)
            if 32 <= each <= 128 and columns <= inputs:
                found.append(RowTiling(rows, columns, warps, manner != "head"))
        return found
    if kind in NIBBLES:
        return list_nibble_tilings(manner, inputs, kind)
    whole = 1 << (inputs // (8 if kind == "int4" else 4) - 1).bit_length()
    found = []
    for rows, words, warps in itertools.product((2, 4, 8, 16), (256, 512, 1024), (2, 4, 8)):
        each = rows * words * matrices / (32 * warps)
        if 16 <= each <= 64 and 128 * warps <= words <= whole:
            found.append(WordsTiling(rows, words, warps))
    return found


def list_nibble_tilings(manner: str, inputs: int, kind: str) -> list[NibbleTiling]:
    """Tilings for one row of 4-bit words that are worth a try: near those that were best on an H200."""
    if inputs > 8192:
        shapes = [
            (4, 1024, 4, 8),
            (2, 1024, 8, 8),
            (2, 2048, 8, 8),
            (4, 2048, 8, 16),
            (8, 1024, 4, 16),
            (4, 1024, 8, 8),
        ]
    elif manner == "gated":
        shapes = [(4, 512, 8, 4), (4, 512, 7, 4), (8, 512, 8, 8), (8, 512, 7, 8), (4, 512, 4, 4), (4, 256, 7, 4)]
    elif manner == "head":
        shapes = [(8, 512, 8, 4), (8, 512, 4, 4), (8, 256, 8, 4)]
    else:
        shapes = [(8, 512, 2, 8), (8, 512, 2, 4), (4, 512, 2, 4), (16, 512, 1, 8), (8, 512, 1, 8)]
    if kind == "halves" and inputs > 8192:
        shapes = shapes[:4]
    return [NibbleTiling(*shape) for shape in shapes]


def prepare_few(name: str, num_rows: int, kind: str | None, tiling: Any, outputs: int | None = None) -> Any:
    """A call of the product of a few rows, for any matrix."""
    usual, inputs, manner = PRODUCTS[name]
    outputs = outputs or usual
    narrow = outputs // 2 if manner == "gated" else outputs
    x = torch.randn(num_rows, inputs, device="cuda", dtype=torch.bfloat16)
    out = torch.zeros(num_rows, narrow, device="cuda", dtype=torch.float32 if manner == "head" else torch.bfloat16)
    settings = settings_of(manner, inputs)
    multiply: Any = multiply_row if kind is None else multiply_words
    if kind in NIBBLES:
        multiply, settings["rounds"] = multiply_nibbles, kind == "bytes"
    return lambda weight: multiply(weight, x, out, tiling, **settings)


def make_weight(outputs: int, inputs: int, kind: str | None) -> Any:
    """A matrix of random numbers, or of random words."""
    if kind is None:
        return torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16) * 0.02
    is_short = kind != "int8"
    words = torch.randint(-(2**31), 2**31 - 1, (outputs, inputs // (8 if is_short else 4)), device="cuda")
    factors = torch.zeros(outputs, inputs // 32, device="cuda", dtype=torch.int32 if is_short else torch.int16)
    return Words(words.int(), factors, "int4" if is_short else "int8")


def compile_few(share: list[tuple[str, int, str | None, Any]]) -> int:
    """Compile tilings into Triton's own cache."""
    for name, num_rows, kind, tiling in share:
        _, inputs, _ = PRODUCTS[name]
        try:  # the number of outputs is no part of what is compiled
            prepare_few(name, num_rows, kind, tiling, 512)(make_weight(512, inputs, kind))
            torch.cuda.synchronize()
        except Exception as error:
            print(name, num_rows, tiling, repr(error)[:100], file=sys.stderr)
    return len(share)


def measure_few(name: str, all_rows: list[int], kind: str | None) -> None:
    """Print cuBLAS' time and the best tilings' for one product of a few rows."""
    outputs, inputs, manner = PRODUCTS[name]
    bits = BITS[kind]
    count = max(2, min(64, int(6e8 / (outputs * inputs * bits / 8))))
    weights = [make_weight(outputs, inputs, kind) for _ in range(count)]
    floor = outputs * inputs * bits / 8 / 4.2e6
    for num_rows in all_rows:
        plain = float("nan")
        if kind is None:
            x = torch.randn(num_rows, inputs, device="cuda", dtype=torch.bfloat16)
            plain = time_graph(lambda x=x: [F.linear(x, weight) for weight in weights]) / count
        found = []
        for tiling in list_few_tilings(manner, inputs, num_rows, kind):
            try:
                call = prepare_few(name, num_rows, kind, tiling)
                found.append((time_graph(lambda call=call: [call(w) for w in weights], 3) / count, tiling))
            except Exception as error:
                print(tiling, repr(error)[:100], file=sys.stderr)
        found.sort(key=lambda one: one[0])
        print(
            f"{name:>8} {num_rows:2} {kind}: floor {floor:6.1f} us, cuBLAS {plain:6.1f} ({floor / plain:.2f})", end=""
        )
        for took, tiling in found[:5]:
            values = tuple(getattr(tiling, field) for field in tiling.__slots__)
            print(f" | {took:6.1f} ({floor / took:.2f}) {values}", end="")
        print(flush=True)


def settings_of(manner: str, inputs: int) -> dict[str, Any]:
    """What a product of that manner is called with."""
    norm = torch.ones(inputs, device="cuda", dtype=torch.bfloat16)
    if manner == "adds":
        return {"adds": True}
    if manner == "gated":
        return {"norm": norm, "eps": 1e-5, "activation": CODES["silu"], "is_gated": True}
    return {"norm": norm, "eps": 1e-5}


def compile_some(share: list[tuple[str, RowTiling]]) -> int:
    """Compile tilings into Triton's own cache, on matrices of few rows."""
    for name, tiling in share:
        _, inputs, manner = PRODUCTS[name]
        weight = torch.zeros(512, inputs, device="cuda", dtype=torch.bfloat16)
        x = torch.zeros(1, inputs, device="cuda", dtype=torch.bfloat16)
        out = torch.zeros(1, 512, device="cuda", dtype=torch.float32 if manner == "head" else torch.bfloat16)
        multiply_row(weight, x, out, tiling, **settings_of(manner, inputs))
    torch.cuda.synchronize()
    return len(share)


def time_graph(function: Any, repeats: int = 5) -> float:
    """Microseconds of one replay."""
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    times = []
    for _ in range(repeats + 1):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times[1:])


def measure_product(name: str) -> RowTiling:
    """Print cuBLAS' time and the best tilings' for one product; give the best."""
    outputs, inputs, manner = PRODUCTS[name]
    count = max(2, min(64, int(6e8 / (outputs * inputs * 2))))
    weights = [torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16) * 0.02 for _ in range(count)]
    x = torch.randn(1, inputs, device="cuda", dtype=torch.bfloat16)
    narrow = outputs // 2 if manner == "gated" else outputs
    out = torch.zeros(1, narrow, device="cuda", dtype=torch.float32 if manner == "head" else torch.bfloat16)
    settings = settings_of(manner, inputs)
    plain = time_graph(lambda: [F.linear(x, weight) for weight in weights]) / count
    floor = outputs * inputs * 2 / 4.2e6
    found = []
    for tiling in list_row_tilings(manner, inputs):
        took = time_graph(lambda t=tiling: [multiply_row(w, x, out, t, **settings) for w in weights], 3) / count
        found.append((took, tiling))
    found.sort(key=lambda one: one[0])
    print(f"{name:>8}: floor {floor:6.1f} us, cuBLAS {plain:6.1f} ({floor / plain:.2f})", end="")
    for took, tiling in found[:4]:
        values = tuple(getattr(tiling, field) for field in tiling.__slots__)
        print(f" | {took:6.1f} ({floor / took:.2f}) {values}", end="")
    print(flush=True)
    return found[0][1]


def measure_attention(width: int, num_rows: int, held: int, layers: int) -> None:
    """Print the best tilings of attention over caches of several layers."""
    heads, kv_heads = 32, 8
    buffers = [
        torch.randn(num_rows, held + 8, 2, kv_heads, width, device="cuda", dtype=torch.bfloat16) for _ in range(layers)
    ]
    base = buffers[0]
    addresses = [(one.data_ptr() - base.data_ptr()) // 16 for one in buffers]
    table = torch.tensor([*addresses, held + 8], device="cuda")
    lengths = torch.full((num_rows,), held, dtype=torch.int32, device="cuda")
    qkv = torch.randn(num_rows, (heads + 2 * kv_heads) * width, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(num_rows, heads * width, device="cuda", dtype=torch.bfloat16)
    turns = torch.rand(num_rows, 2, width // 2, device="cuda")
    floor = num_rows * held * 2 * kv_heads * width * 2 / 4.2e6
    found = []
    for (block, chunk), programs, (warps, stages) in itertools.product(
        ((64, 64), (64, 128), (128, 128), (64, 256), (128, 256)), (64, 128, 256), ((4, 1), (4, 2), (4, 3), (2, 2))
    ):
        tiling = AttentionTiling(block, chunk, programs, warps, stages)
        shape = HeadShape(heads, kv_heads, width, width**-0.5)
        try:
            step = StepAttention(num_rows, shape, torch.device("cuda"), tiling)
            took = time_graph(
                lambda step=step: [
                    step(qkv, out, base, table, lengths, layer, layers, turns=turns) for layer in range(layers)
                ],
                3,
            )
            found.append((took / layers, tiling))
        except Exception as error:
            print(tiling, repr(error)[:100], file=sys.stderr)
            torch.cuda.synchronize()
    found.sort(key=lambda one: one[0])
    print(f"attention width {width} rows {num_rows} keys {held}: floor {floor:.1f} us", end="")
    for took, tiling in found[:4]:
        print(f" | {took:.1f} {tuple(getattr(tiling, field) for field in tiling.__slots__)}", end="")
    print(flush=True)


def main() -> None:
    """Compile everything in parallel, then time one after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=15)
    parser.add_argument("--attention-only", action="store_true")
    parser.add_argument("--save", action="store_true", help="keep the best for later processes on this machine")
    parser.add_argument("--rows", type=int, nargs="+", help="products of so many rows instead of one")
    parser.add_argument("--only", default="", help="products whose name holds this")
    parser.add_argument(
        "--kinds", nargs="+", default=["plain"], help="plain, int4, int8; halves, bytes: int4 and one row"
    )
    options = parser.parse_args()
    if options.rows:
        names = [name for name in PRODUCTS if options.only in name]
        kinds = [None if kind == "plain" else kind for kind in options.kinds]
        jobs = [
            (name, rows, kind, tiling)
            for name, rows, kind in itertools.product(names, options.rows, kinds)
            if rows == 1 or kind not in NIBBLES
            for tiling in list_few_tilings(PRODUCTS[name][2], PRODUCTS[name][1], rows, kind)
        ]
        with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
            pool.map(compile_few, [jobs[first :: options.processes] for first in range(options.processes)])
        for kind, name in itertools.product(kinds, names):
            measure_few(name, [1] if kind in NIBBLES else options.rows, kind)
        return
    for width, num_rows, held, layers in ATTENTIONS:
        measure_attention(width, num_rows, held, layers)
    if options.attention_only:
        return
    jobs = [
        (name, tiling) for name, (_, inputs, manner) in PRODUCTS.items() for tiling in list_row_tilings(manner, inputs)
    ]
    shares = [jobs[first :: options.processes] for first in range(options.processes)]
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        pool.map(compile_some, shares)
    best = {PRODUCTS[name][:2]: measure_product(name) for name in PRODUCTS}
    if options.save:
        print(f"kept in {write_measured(best)}")


if __name__ == "__main__":
    main()
