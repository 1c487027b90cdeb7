"""Calls tried in plain processes: no limits on memory, which devices need, and none on time."""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Iterator
from queue import Empty
from random import Random
from typing import Any


def try_calls(seeds: range, minutes: float, device: str, is_native: bool, told: Any) -> None:
    """Try calls of these seeds on a device for so long, and put findings and the number of calls into a queue.

    If `is_native`, our native models are compared there and on the CPU, instead of with transformers.
    """
    import warnings

    import torch

    from tests.fuzz.beside import models
    from tests.fuzz.beside.calls import draw
    from tests.fuzz.beside.trying import shrink, try_call, try_devices, write_script

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    deadline, num_tried = time.monotonic() + 60 * minutes, 0
    with models.on(device):
        for seed in seeds:
            if time.monotonic() > deadline:
                break
            call = draw(Random(f"beside_transformers:{seed}"))
            num_tried += 1
            found = try_devices(call, device) if is_native else try_call(call)
            if found:
                smaller, unlike = (call, found[0]) if is_native else shrink(call, found[0])
                lines = "\n".join(map(str, found))
                script = write_script(smaller)
                told.put((0, f"seed {seed}: {call.model}, {call.strategy}\n{lines}\n# smaller: {unlike}\n{script}"))
    told.put((num_tried, ""))


def listen(first_seed: int, minutes: float, jobs: int, device: str, is_native: bool) -> Iterator[tuple[int, str]]:
    """Pairs (calls tried, finding) of so many processes, until each has ended."""
    spawning = multiprocessing.get_context("spawn")
    told = spawning.Queue()
    processes = []
    for job in range(jobs):
        seeds = range(first_seed + job, sys.maxsize, jobs)
        given = (seeds, minutes, device, is_native, told)
        processes.append(spawning.Process(target=try_calls, args=given, daemon=True))
        processes[-1].start()
    while True:
        try:
            yield told.get(timeout=1)
        except Empty:
            if not any(process.is_alive() for process in processes):
                return
