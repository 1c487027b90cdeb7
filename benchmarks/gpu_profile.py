"""Which kernels a captured step spends its time in: `python benchmarks/gpu_profile.py --shape 1B --run 1x256`."""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gpu_step import make_model  # benchmarks/gpu_step.py

from unspool.protocols import Forward, Want


def profile_step(model: Any, batch: int, context: int, new: int = 1, most: int = 14) -> None:
    """Print a captured pass's time, and its kernels by the time that they take."""
    cache = model.new_cache("dynamic", batch, context + 64 * new)
    want = Want(logits="all" if new > 1 else "last")
    model.forward(torch.randint(0, 1000, (batch, context), device="cuda"), cache)
    tokens = torch.randint(0, 1000, (batch, new), device="cuda")
    name = f"{batch}x{context} x {new}"
    profile_passes(lambda: model.forward(tokens, cache, want=want), name, most)
    profile_layers(lambda: model.forward(tokens, cache, want=want), name, model.spec.num_layers)


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


class Kernel(NamedTuple):
    """A kernel of a pass: times in microseconds."""

    name: str
    lasts: float  # from its own begin, which may lie before the end of the kernel that it waits for
    adds: float  # from the end of the kernel before it: over a pass, these add up to its time


def trace_device(run: Callable[[], object], passes: int, kinds: Sequence[str]) -> list[tuple[float, float, str]]:
    """What the device did, in the order in which it ended: when that was, how long it took, and what it was."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(passes):
            run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return sorted((one["ts"] + one["dur"], one["dur"], one["name"]) for one in events if one.get("cat") in kinds)


def list_kernels(run: Callable[[], object], passes: int = 4) -> list[list[Kernel]]:
    """The kernels of some passes, each in the order in which they end."""
    times = trace_device(run, passes, ("kernel",))
    each = len(times) // passes
    found = []
    for first in range(0, each * passes, each):
        ends = [end for end, *_ in times[first : first + each]]
        ends.insert(0, ends[0] - times[first][1])  # the first kernel's begin
        found.append(
            [
                Kernel(name, lasts, end - before)
                for before, (end, lasts, name) in zip(ends[:-1], times[first : first + each], strict=True)
            ]
        )
    return found


def profile_steps(run: Callable[[], object], name: str, last: str, num_layers: int) -> None:
    """Print what each part of a text's steps adds, where each step ends with a kernel of a name: medians of the second
    half of the steps. Copies and torch's own kernels between steps are parts too."""
    times = trace_device(run, 1, ("kernel", "gpu_memcpy", "gpu_memset"))
    ends = [place for place, (*_, what) in enumerate(times) if what == last]
    steps = [times[before : end + 1] for before, end in pairwise(ends)]
    steps = steps[len(steps) // 2 :]
    size = statistics.mode(map(len, steps))
    whole = statistics.mean(one[-1][0] - one[0][0] for one in steps)
    alike = [one for one in steps if len(one) == size]
    print(
        f"{name}: {whole:.1f} us a step of a text under the profiler, {len(alike)} of {len(steps)} of {size - 1} parts"
    )
    adds = [statistics.median(one[place][0] - one[place - 1][0] for one in alike) for place in range(1, size)]
    names = [what for *_, what in alike[0][1:]]
    first, count = find_layers(names, num_layers)
    for slot in range(count):
        places = range(first + slot, first + num_layers * count, count)
        lasts = statistics.median(alike[0][1 + place][1] for place in places)
        mean = statistics.mean(adds[place] for place in places)
        print(f"{mean:9.2f} us a layer, lasts {lasts:6.2f}  {names[first + slot][:60]}")
    for place, what in enumerate(names):
        if not first <= place < first + num_layers * count:
            print(f"{adds[place]:9.2f} us once, lasts {alike[0][1 + place][1]:6.2f}  {what[:60]}")


def find_layers(names: list[str], num_layers: int) -> tuple[int, int]:
    """Where the layers' kernels begin in a pass, and how many a layer has; (0, 0) if they are not alike."""
    for size in range(2, len(names) // num_layers + 1):
        for first in range(len(names) - num_layers * size + 1):
            if names[first : first + num_layers * size] == names[first : first + size] * num_layers:
                return first, size
    return 0, 0


def profile_layers(run: Callable[[], object], name: str, num_layers: int) -> None:
    """Print what each kernel of a layer adds to a pass, the median of all layers, and what the others add."""
    passes = list_kernels(run)
    first, size = find_layers([one.name for one in passes[0]], num_layers)
    whole = statistics.median(sum(one.adds for one in kernels) for kernels in passes)
    print(f"{name}: {whole:.1f} us a pass under the profiler, {len(passes[0])} kernels, {size} a layer")
    for slot in range(size):
        alike = [one for kernels in passes for one in kernels[first : first + num_layers * size][slot::size]]
        adds, lasts = (statistics.median(getattr(one, what) for one in alike) for what in ("adds", "lasts"))
        print(f"{adds:9.2f} us, lasts {lasts:6.2f}  {alike[0].name[:60]}")
    for place, one in enumerate(passes[0]):
        if not first <= place < first + num_layers * size:
            adds = statistics.median(kernels[place].adds for kernels in passes)
            print(f"{adds:9.2f} us once, lasts {one.lasts:6.2f}  {one.name[:60]}")


@torch.no_grad()
def main() -> None:
    """Profile one step of a shape of Llama's."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="1B")
    parser.add_argument("--run", default="1x256", help="batch x context")
    parser.add_argument("--new", type=int, default=1, help="tokens a row: more than one are drafts that are checked")
    parser.add_argument("--quantize", choices=["int8", "int4", "fp8"], help="weights of so many bits")
    options = parser.parse_args()
    batch, context = map(int, options.run.split("x"))
    model = make_model(options.shape, options.quantize)
    print(options.shape, end=" ")
    profile_step(model, batch, context, options.new)


if __name__ == "__main__":
    main()
