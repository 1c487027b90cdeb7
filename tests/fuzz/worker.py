"""The process that tries inputs: within limits, one after the other, each told of as it ends."""

from __future__ import annotations

import faulthandler
import os
import resource
import shutil
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

CPU_SECONDS = 10
EXCESS_BYTES = 2 << 30  # what one input may not add to the memory in use
_ROOM_BYTES = 3 << 30  # what it may add to the address space: more, as not all of that is memory in use
_LEAK_BYTES = 400 << 20  # a worker that has grown by this is replaced
_LARGEST_FILE = 1 << 30


def work(pipe: Connection, folder: Path) -> None:
    """Take batches (kind, seeds) until there are none; for every input send (verdict, details, used up)."""
    os.setsid()  # so that the parent can end what an input has started, too
    with (folder / "stderr").open("wb") as log:
        os.dup2(log.fileno(), 2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    faulthandler.enable()

    import torch

    from tests.fuzz.findings import find_kind, try_input

    torch.set_num_threads(1)
    tempfile.tempdir = str(folder)  # what inputs leave behind is removed with it
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (_LARGEST_FILE, _LARGEST_FILE))
    place = folder / "input"
    first_use: int | None = None
    while (batch := pipe.recv()) is not None:
        name, seeds = batch
        kind = find_kind(name)
        kind.warm()
        pipe.send(("ready", "", False))
        for seed in seeds:
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir(parents=True)
            used, highest = _memory_in_use(), _highest_use()
            _set_limits()
            outcome = try_input(kind, seed, place)
            verdict, details = outcome.verdict, outcome.details
            if (now := _highest_use()) > highest and now - used > EXCESS_BYTES:
                verdict, details = "excess", f"{(now - used) >> 20} MiB were added; it ended {verdict}\n{details}"
            after = _memory_in_use()
            first_use = first_use or after
            used_up = after - first_use > _LEAK_BYTES
            pipe.send((verdict, details, used_up))
            if used_up:
                pipe.recv()  # until the parent ends this process
                return


def _set_limits() -> None:
    """Give the next input its seconds and its address space, counted from now."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    seconds = int(usage.ru_utime + usage.ru_stime) + CPU_SECONDS + 1
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.RLIM_INFINITY))
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + _ROOM_BYTES, resource.RLIM_INFINITY))


def _memory_in_use() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _highest_use() -> int:
    """The most memory this process has had in use, or one of its children."""
    usages: list[Any] = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return max(usage.ru_maxrss for usage in usages) * 1024
