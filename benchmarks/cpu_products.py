"""Products of the CPU library beside torch's, by processor time: rows of activations times matrices of one kind.

    OMP_NUM_THREADS=1 python benchmarks/cpu_products.py --shapes 576x1536 2048x8192 --rows 1 4 8 16 32

A shape is (outputs)x(inputs). Matrices take turns, so that weights come from memory as they do in a model. Processor
time counts what all threads use, so another process disturbs it little; `--wall` measures the clock, when idle.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from unspool.kernels.cpu import find_library, pack_tiles, quantise_rows, read_supers
from unspool.kernels.cpu.structures import NARROW, count_narrow_bytes, describe_matrix
from unspool.kernels.cpu.supers import SUPER_BYTES, SUPER_KINDS, count_columns

NARROW_KINDS = {name: dtype for dtype, name in NARROW.items()}
STORED = {kind: name for name, kind in SUPER_KINDS.items()} | {"q5": "Q5_1"}


def make_tiles(kind: str, outputs: int, inputs: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if kind in STORED:
        size, width = SUPER_BYTES[kind], count_columns(kind)
        raw = torch.randint(0, 256, (outputs * inputs // width, size), generator=generator, dtype=torch.uint8)
        for at in (208,) if kind == "q6_k" else (0, 2):
            raw[:, at : at + 2] = torch.tensor([1e-4]).half().view(torch.uint8)
        blocks = read_supers(raw.flatten(), STORED[kind], (outputs, inputs))
        assert blocks is not None
        return pack_tiles(blocks)
    weight = torch.randn(outputs, inputs, generator=generator)
    if kind in NARROW_KINDS:
        dtype, num_bytes, library = NARROW_KINDS[kind], count_narrow_bytes(outputs, inputs), find_library()
        assert num_bytes is not None
        assert library is not None
        tiles = torch.empty(num_bytes, dtype=torch.uint8).view(dtype)
        assert library.narrow_rows(weight.to(dtype).float(), tiles)
        return tiles
    return weight if kind == "float32" else pack_tiles(quantise_rows(weight, kind))


def measure(call: Callable[[int], object], count: int, seconds: float, clock: Callable[[], float]) -> float:
    """Seconds of one call: the least of several rounds over all matrices."""
    for place in range(count):
        call(place)
    best, spent = float("inf"), 0.0
    while spent < seconds:
        before = clock()
        for place in range(count):
            call(place)
        took = clock() - before
        best, spent = min(best, took / count), spent + took
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["576x1536", "2048x8192"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4, 8, 16, 32])
    parser.add_argument(
        "--kinds", nargs="+", default=["float32"], choices=["float32", *NARROW_KINDS, "int8", "int4", *STORED]
    )
    parser.add_argument("--megabytes", type=int, default=192, help="of matrices that take turns")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.6)
    parser.add_argument("--wall", action="store_true")
    parser.add_argument("--no-torch", action="store_true")
    options = parser.parse_args()
    library, clock = find_library(), time.perf_counter if options.wall else time.process_time
    if library is None:
        raise SystemExit("there is no CPU library")
    library.threads = options.threads
    torch.set_num_threads(options.threads)
    print(
        f"{library.instructions}, {options.threads} threads, {'wall' if options.wall else 'processor'} time of a call"
    )
    print(f"{'shape':>12} {'kind':>8} {'rows':>5} {'us':>9} {'GFLOP/s':>9} {'GB/s':>7} {'torch us':>9} {'GFLOP/s':>9}")
    for shape in options.shapes:
        outputs, inputs = map(int, shape.split("x"))
        for kind in options.kinds:
            first = make_tiles(kind, outputs, inputs, 0)
            count = max(1, (options.megabytes << 20) // first.nbytes)
            tiles = [first, *(first.clone() for _ in range(count - 1))]
            matrices = [describe_matrix(data, None, kind, outputs, inputs) for data in tiles]
            for rows in options.rows:
                x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(1))

                def ours(place: int, x: torch.Tensor = x, matrices: list[object] = matrices) -> object:
                    return library.multiply(matrices[place], x)

                def theirs(place: int, x: torch.Tensor = x, tiles: list[torch.Tensor] = tiles) -> object:
                    return torch.nn.functional.linear(x, tiles[place])

                took, work = measure(ours, count, options.seconds, clock), 2 * rows * outputs * inputs
                line = f"{shape:>12} {kind:>8} {rows:>5} {took * 1e6:>9.1f} {work / took / 1e9:>9.1f}"
                line += f" {first.nbytes / took / 1e9:>7.1f}"
                if kind == "float32" and not options.no_torch:
                    other = measure(theirs, count, options.seconds, clock)
                    line += f" {other * 1e6:>9.1f} {work / other / 1e9:>9.1f}"
                print(line, flush=True)


if __name__ == "__main__":
    main()
