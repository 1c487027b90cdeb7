"""How to cut products of several rows on this GPU: `python benchmarks/gpu_rows.py --rows 8 64 --kinds plain int4`.

Every tiling is compared with the reference first, then timed inside a CUDA graph over as many distinct matrices as
outgrow the cache, with what a block needs beside it: the sum of parts, the residual and the norm after `out` and
`down`, the gate after `up`. "cuBLAS" is torch's product of 16-bit numbers with the same kernels beside it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from gpu_tilings import PRODUCTS, time_graph  # benchmarks/gpu_tilings.py

from unspool.kernels.gpu import launching
from unspool.kernels.gpu.products.activations import CODES
from unspool.kernels.gpu.products.arranging import arrange
from unspool.kernels.gpu.products.gating import gate
from unspool.kernels.gpu.products.norms import normalise
from unspool.kernels.gpu.products.parts import add_parts
from unspool.kernels.gpu.products.product import multiply
from unspool.kernels.gpu.products.rows_product import RowsTiling, multiply_rows
from unspool.kernels.gpu.products.words import Words, round_floats

BITS = {"plain": 16, "int4": 5, "int8": 8.5, "fp8": 8}
BANDWIDTH = 4.2e6  # bytes per microsecond
MOST_TOGETHER = 128  # rows of a program
SHARES = (1, 2)  # programs per multiprocessor that splits aim at

# outputs, columns (or words), warps, stages
FEW = {
    "plain": [(64, 64, 4, 6), (64, 128, 4, 4), (64, 256, 4, 3), (128, 64, 8, 5), (128, 128, 8, 3)],
    "int4": [(64, 16, 4, 4), (64, 16, 4, 6), (64, 32, 4, 3), (64, 32, 4, 5), (128, 16, 8, 5), (128, 32, 8, 3)],
    "int8": [(64, 32, 4, 4), (64, 32, 4, 6), (64, 64, 4, 3), (64, 64, 4, 4), (128, 64, 8, 3)],
    "fp8": [(64, 32, 4, 4), (64, 32, 4, 6), (64, 64, 4, 3), (64, 64, 4, 4), (128, 64, 8, 3)],
}
MANY = {
    "plain": [(64, 64, 4, 5), (64, 128, 4, 3), (128, 64, 4, 4), (128, 64, 8, 4), (128, 128, 8, 3)],
    "int4": [(64, 16, 4, 3), (64, 16, 4, 5), (64, 32, 4, 3), (128, 16, 8, 3), (128, 16, 8, 4), (128, 32, 8, 3)],
    "int8": [(64, 32, 4, 3), (64, 32, 4, 5), (64, 64, 4, 3), (128, 32, 8, 3), (128, 32, 8, 4), (128, 64, 8, 2)],
    "fp8": [(64, 32, 4, 3), (64, 32, 4, 5), (64, 64, 4, 3), (128, 32, 8, 3), (128, 32, 8, 4), (128, 64, 8, 2)],
}


def list_shapes(kind: str, num_rows: int) -> list[tuple[int, int, int, int]]:
    """Outputs, columns, warps and stages that are worth a try."""
    return FEW[kind] if num_rows <= 16 else MANY[kind]


def pad_rows(num_rows: int) -> int:
    """Rows, as many as programs can take together."""
    return max(16, 1 << (num_rows - 1).bit_length())


def make_weight(outputs: int, inputs: int, kind: str) -> Any:
    """A matrix of random numbers, quantised or not."""
    if kind == "plain":
        return torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16) * 0.02
    if kind == "fp8":
        return round_floats(torch.randn(outputs, inputs, device="cuda") * 0.02)
    numbers = 8 if kind == "int4" else 4
    words = torch.empty(outputs, inputs // numbers, device="cuda", dtype=torch.int32)
    words.random_(-(2**31), 2**31 - 1)
    scales = (torch.rand(outputs, inputs // 32, device="cuda") * 0.004 + 0.002).half()
    if kind == "int8":
        return Words(words, (scales / 16).view(torch.int16), "int8")
    factors = torch.stack((scales, -7.5 * scales), -1).view(torch.int32).squeeze(-1)
    return Words(words, factors, "int4")


def check(kind: str, manner: str, num_rows: int, shape: tuple[int, int, int, int]) -> float:
    """The relative error of one tiling."""
    outputs, inputs, is_gated = 1008, 4096, manner == "gated"  # divisible by 16, as what is timed
    weight = make_weight(outputs * (2 if is_gated else 1), inputs, kind)
    x = torch.randn(num_rows, inputs, device="cuda", dtype=torch.bfloat16)
    splits = 1 if is_gated else 3
    tiling = RowsTiling(min(pad_rows(num_rows), MOST_TOGETHER), shape[0], shape[1], splits, *shape[2:])
    out = torch.full((num_rows, outputs), torch.nan, device="cuda", dtype=torch.bfloat16)
    exact = weight.double() if kind == "plain" else weight.dequantise(torch.float64)
    expected = F.linear(x.double(), exact)
    if kind != "plain":
        x = arrange(x, weight.bits)
    if is_gated:
        multiply_rows(weight, x, out, tiling, activation=CODES["silu"], is_gated=True)
        expected = F.silu(expected[:, :outputs]) * expected[:, outputs:]
    else:
        parts = torch.full((splits, num_rows, outputs), torch.nan, device="cuda")
        multiply_rows(weight, x, parts, tiling)
        add_parts(parts, out)
    return float((out.double() - expected).norm() / expected.norm())


def add_some(outputs: int, splits: int, *, is_whole: bool) -> None:
    """A sum of parts, as `run_rows` needs it."""
    parts, out = torch.zeros(splits, 8, outputs, device="cuda"), torch.zeros(8, outputs, device="cuda").bfloat16()
    if is_whole:
        add_parts(parts, out, adds=True, normed=torch.zeros_like(out), norm=out[0], eps=1e-5)
    else:
        add_parts(parts, out)


def _compile_launched(launched: Any) -> None:
    kernel, grid, arguments, options = launched
    kernel.warmup(*arguments, grid=grid, **options)


def compile_one(job: tuple[Any, ...]) -> None:
    """Compile a tiling, or a sum of parts, into Triton's cache."""
    launching._state.take = _compile_launched
    try:
        if job[0] == "parts":
            add_some(job[1], job[2], is_whole=job[3])
        else:
            check(*job)
    except Exception as error:
        print("compile", job, repr(error)[:300], flush=True)


def run_plain(weight: torch.Tensor, x: torch.Tensor, manner: str, buffers: dict[str, torch.Tensor]) -> None:
    """The product and what a block needs beside it, with cuBLAS."""
    if manner == "adds":
        out = buffers["out"]
        torch.addmm(out, x, weight.t(), out=out)
        normalise(out, buffers["norm"], 1e-5, buffers["normed"])
    elif manner == "gated":
        gate(F.linear(x, weight), CODES["silu"], buffers["out"])
    elif manner == "head":
        multiply(weight, x, buffers["out"])
    else:
        torch.mm(x, weight.t(), out=buffers["out"])


def run_rows(weight: Any, x: torch.Tensor, manner: str, buffers: dict[str, torch.Tensor], tiling: RowsTiling) -> None:
    """The same by our kernels."""
    if manner == "gated":
        multiply_rows(weight, x, buffers["out"], tiling, activation=CODES["silu"], is_gated=True)
    elif manner == "adds":
        parts = buffers["parts"][: tiling.splits]
        multiply_rows(weight, x, parts, tiling)
        add_parts(parts, buffers["out"], adds=True, normed=buffers["normed"], norm=buffers["norm"], eps=1e-5)
    else:  # a part of one: float32, so that one variant serves QKV and the head
        parts = buffers["parts"][: tiling.splits]
        multiply_rows(weight, x, parts, tiling)
        if tiling.splits > 1:
            add_parts(parts, buffers["out"])


def run_all(run: Any, weights: list[Any], *arguments: Any) -> None:
    """One product after the other."""
    for weight in weights:
        run(weight, *arguments)


def list_splits(manner: str, outputs: int, width: int, shape: tuple[int, int, int, int]) -> list[int]:
    """Parts of the columns that fill the GPU."""
    programs, steps = -(-outputs // shape[0]), width // shape[1]
    if manner in ("gated", "head"):
        return [1]
    found = {1}
    for share in SHARES:
        wanted = max(1, min(8, steps, round(132 * share / programs)))
        found |= {1 << (wanted.bit_length() - 1), min(8, 1 << (wanted - 1).bit_length())}
    return sorted(found)


def measure(name: str, kind: str, all_rows: list[int], most: int) -> None:
    """Print cuBLAS' time and the best tilings' for one product."""
    outputs, inputs, manner = PRODUCTS[name]
    size = outputs * inputs * BITS[kind] / 8
    count = max(2, min(24, int(3e8 / size)))
    weights = [make_weight(outputs, inputs, kind) for _ in range(count)]
    narrow = outputs // 2 if manner == "gated" else outputs
    floor = size / BANDWIDTH
    width = inputs // {"plain": 1, "int4": 8, "int8": 4, "fp8": 4}[kind]
    for num_rows in all_rows:
        x = torch.randn(num_rows, inputs, device="cuda", dtype=torch.bfloat16)
        buffers = {
            "out": torch.zeros(
                num_rows, narrow, device="cuda", dtype=torch.float32 if manner == "head" else torch.bfloat16
            ),
            "normed": torch.zeros(num_rows, narrow, device="cuda", dtype=torch.bfloat16),
            "norm": torch.ones(narrow, device="cuda", dtype=torch.bfloat16),
            "parts": torch.zeros(1 if manner == "head" else 16, num_rows, narrow, device="cuda"),
        }
        plain = float("nan")
        if kind == "plain":
            plain = time_graph(partial(run_all, run_plain, weights, x, manner, buffers), 3) / count
        found = []
        for shape in list_shapes(kind, num_rows):
            for splits in list_splits(manner, narrow, width, shape):
                tiling = RowsTiling(min(pad_rows(num_rows), MOST_TOGETHER), shape[0], shape[1], splits, *shape[2:])
                try:
                    took = time_graph(partial(run_all, run_rows, weights, x, manner, buffers, tiling), 3)
                    found.append((took / count, tiling))
                except Exception as error:
                    print(name, kind, tiling, repr(error)[:120], flush=True)
        found.sort(key=lambda one: one[0])
        print(f"{name:>8} {num_rows:3} {kind}: floor {floor:5.1f}, cuBLAS {plain:5.1f}", end="")
        for took, tiling in found[:most]:
            values = tuple(getattr(tiling, field) for field in tiling.__slots__)
            print(f" | {took:5.1f} {','.join(map(str, values))}", end="")
        print(flush=True)


def main() -> None:
    """Compile everything in parallel, compare, time one after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=15)
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--kinds", nargs="+", default=["int4", "plain", "int8"], choices=BITS)
    parser.add_argument("--only", default="", help="products whose name holds this")
    parser.add_argument("--most", type=int, default=6, help="tilings to print")
    options = parser.parse_args()
    jobs: list[Any] = [
        (kind, manner, num_rows, shape)
        for kind in options.kinds
        for num_rows in options.rows
        for manner in ("adds", "gated")
        for shape in list_shapes(kind, num_rows)
    ]
    sums = [
        ("parts", outputs, splits, manner == "adds")
        for outputs, _, manner in PRODUCTS.values()
        if manner in ("norm", "adds")
        for splits in (1, 2, 4, 8)
    ]
    begin = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        pool.map(compile_one, [*jobs, *sums], chunksize=1)
    print(f"{len(jobs)} variants compiled in {time.perf_counter() - begin:.1f} s", flush=True)
    for job in jobs:
        try:
            error = check(*job)
            if not error < 6e-3:
                print("wrong:", job, error, flush=True)
        except Exception as error:
            print("failed:", job, repr(error)[:300], flush=True)
    print(f"compared after {time.perf_counter() - begin:.1f} s", flush=True)
    for kind in options.kinds:
        for name in PRODUCTS:
            if options.only in name:
                measure(name, kind, options.rows, options.most)
    print(f"done after {time.perf_counter() - begin:.1f} s", flush=True)


if __name__ == "__main__":
    main()
