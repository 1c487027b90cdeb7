"""Inputs by the thousand, in processes that may crash, hang or eat memory without harm to anyone."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path

from tests.fuzz.findings import FAULTS, find_kind, list_kinds
from tests.fuzz.worker import work

WALL_SECONDS = 30.0
_START_SECONDS = 180.0  # a worker's imports, on a busy machine
_BATCH = 20
_HEADS = {"uncaught": "uncaught", "hung": "hung", "excess": "over 2 GB", "crashed": "crashed", "different": "different"}


@dataclass(frozen=True)
class Finding:
    """An input that did not end as it must."""

    kind: str
    seed: int
    verdict: str
    details: str

    def __str__(self) -> str:
        return f"{self.verdict}: python -m tests.fuzz --kind {self.kind} --seed {self.seed} --count 1\n{self.details}"


@dataclass
class Tally:
    """What became of the inputs of each kind."""

    counts: dict[str, Counter[str]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    def add(self, kind: str, seed: int, verdict: str, details: str) -> None:
        """Count one input."""
        self.counts.setdefault(kind, Counter())[verdict] += 1
        if verdict in FAULTS:
            self.findings.append(Finding(kind, seed, verdict, details))

    @property
    def tried(self) -> int:
        """How many inputs were tried."""
        return sum(counts.total() for counts in self.counts.values())

    def table(self) -> str:
        """One line per kind, and one for all, in Markdown."""
        lines = [["kind", "tried", "clean", "of them refused", *(_HEADS[fault] for fault in FAULTS)]]
        for name, counts in [*sorted(self.counts.items()), ("all", sum(self.counts.values(), Counter()))]:
            numbers = (counts.total(), counts["clean"] + counts["refused"], counts["refused"])
            lines.append([name, *(f"{number:,}" for number in (*numbers, *(counts[fault] for fault in FAULTS)))])
        widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
        rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
        cells = [[cell.ljust(widths[0]) if not i else cell.rjust(widths[i]) for i, cell in enumerate(x)] for x in lines]
        return "\n".join(f"| {' | '.join(line)} |" for line in (cells[0], rule, *cells[1:]))


class Draw:
    """Batches of (kind, seeds): kinds in proportion to their shares, seeds of each in order."""

    def __init__(self, names: list[str], first_seed: int, count: int | None) -> None:
        self.first_seed, self.count = first_seed, count
        self.shares = {name: find_kind(name).share for name in names}
        self.given = dict.fromkeys(names, 0)

    def __iter__(self) -> Iterator[tuple[str, list[int]]]:
        return self

    def __next__(self) -> tuple[str, list[int]]:
        open_kinds = [name for name in self.given if self.count is None or self.given[name] < self.count]
        if not open_kinds:
            raise StopIteration
        name = min(open_kinds, key=lambda name: self.given[name] / self.shares[name])
        size = _BATCH if self.count is None else min(_BATCH, self.count - self.given[name])
        start = self.first_seed + self.given[name]
        self.given[name] += size
        return name, list(range(start, start + size))


class Clock:
    """The seconds that this process could run: a machine that slept does not make an input slow."""

    _LONGEST = 5.0  # between two looks, of a process that is not stopped

    def __init__(self) -> None:
        self._ran, self._seen = 0.0, time.monotonic()

    def now(self) -> float:
        """Seconds since the beginning."""
        seen = time.monotonic()
        self._ran += min(seen - self._seen, self._LONGEST)
        self._seen = seen
        return self._ran


clock = Clock()


class Worker:
    """One process and the batch it is at; a watchdog ends it when an input takes too long."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.batch: tuple[str, list[int]] | None = None
        self._start()

    def _start(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        context = multiprocessing.get_context("spawn")
        self.pipe: Connection
        self.pipe, theirs = context.Pipe()
        self.process: SpawnProcess = context.Process(target=work, args=(theirs, self.folder), daemon=False)
        self.process.start()
        theirs.close()
        self.is_ready = False
        self.since = clock.now()

    def give(self, batch: tuple[str, list[int]]) -> None:
        """Send a batch to try."""
        self.batch = batch
        self.is_ready = False
        self.since = clock.now()
        try:
            self.pipe.send(batch)
        except OSError:
            self.restart()

    def end(self) -> None:
        """Kill the process and all that it has started."""
        for stop in (lambda: os.killpg(self.process.pid or 0, signal.SIGKILL), self.process.kill):
            try:
                stop()
            except (ProcessLookupError, PermissionError):
                continue
        self.process.join()
        self.pipe.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def restart(self) -> None:
        """A fresh process, which goes on with what is left of the batch."""
        self.end()
        self._start()
        if self.batch is not None and self.batch[1]:
            self.pipe.send(self.batch)

    def listen(self, tell: Callable[[str, int, str, str], None]) -> None:
        """Tell of one message, or of the process's end."""
        assert self.batch is not None
        name, seeds = self.batch
        try:
            verdict, details, used_up = self.pipe.recv()
        except (EOFError, ConnectionError):
            self.process.join()
            verdict, details = self._explain_end()
            used_up = True
            if not self.is_ready:
                raise RuntimeError(f"A worker can't start with the kind {name}:\n{details}") from None
        self.since = clock.now()
        if verdict == "ready":
            self.is_ready = True
            return
        tell(name, seeds.pop(0), verdict, details)
        if used_up:
            self.restart()

    def watch(self, tell: Callable[[str, int, str, str], None]) -> None:
        """End a process whose input takes too long."""
        if self.batch is None or not self.batch[1]:
            return
        waited = clock.now() - self.since
        if waited > (WALL_SECONDS if self.is_ready else _START_SECONDS):
            if not self.is_ready:
                raise RuntimeError(f"A worker did not start with the kind {self.batch[0]} in {waited:.0f} s.")
            tell(self.batch[0], self.batch[1].pop(0), "hung", f"no end after {waited:.0f} s of wall time\n")
            self.restart()

    def _explain_end(self) -> tuple[str, str]:
        code = self.process.exitcode or 0
        said = (self.folder / "stderr").read_bytes()[-1500:].decode("utf-8", "replace")
        if code == -signal.SIGXCPU:
            return "hung", f"over the limit of CPU time\n{said}"
        name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return "crashed", f"{name}\n{said}"


def run(
    names: list[str] | None = None,
    *,
    minutes: float | None = None,
    count: int | None = None,
    first_seed: int = 0,
    jobs: int = 2,
    say: Callable[[str], None] = print,
) -> Tally:
    """Try inputs of the kinds for so many minutes, or `count` of each kind, and count what became of them."""
    tally = Tally()
    draw = Draw(names or list_kinds(), first_seed, count)
    began = clock.now()
    deadline = began + minutes * 60 if minutes is not None else float("inf")
    told = began
    root = Path(tempfile.mkdtemp(prefix="unspool-fuzz-"))
    workers: list[Worker] = []

    def tell(kind: str, seed: int, verdict: str, details: str) -> None:
        tally.add(kind, seed, verdict, details)
        if verdict in FAULTS:
            say(str(tally.findings[-1]).splitlines()[0])

    try:
        workers += [Worker(root / str(index)) for index in range(jobs)]
        while clock.now() < deadline:
            for worker in workers:
                if (worker.batch is None or not worker.batch[1]) and (batch := next(draw, None)):
                    worker.give(batch)
            busy = {worker.pipe: worker for worker in workers if worker.batch and worker.batch[1]}
            if not busy:
                break
            for pipe in wait(list(busy), timeout=1.0):
                busy[pipe].listen(tell)
            for worker in workers:
                worker.watch(tell)
            if clock.now() - told > 10:
                told = clock.now()
                seconds, found = told - began, len(tally.findings)
                say(f"{seconds:6.0f} s: {tally.tried:,} inputs, {tally.tried / seconds:.0f} a second, {found} findings")
    except KeyboardInterrupt:
        say("interrupted")
    finally:
        for worker in workers:
            worker.end()
        shutil.rmtree(root, ignore_errors=True)
    return tally
