"""The tests that need a GPU, in several processes at once: one process leaves the device idle most of the time.

    python tools/gpu_tests.py                                   all of tests/gpu
    python tools/gpu_tests.py --jobs 4 tests/gpu/test_caches.py -- -k quantized
    make gpu JOBS=4 TESTS=tests/gpu/test_caches.py              the same, with the python at hand

Needs nothing but pytest. Each process collects all tests and keeps every n-th one, for which this file is also its
plugin. Those that are marked `whole_card` take a card's whole memory, and run after the others, in one process.
Failures are printed as they happen, and how far the tests are every 15 s; a run that is interrupted (Ctrl-C, SIGTERM,
--limit) still ends with its summary. Logs stay in the folder that is named there. On an H200 14 processes ran 5,972
tests in 328 s (2026-11-19).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest

ROOT = Path(__file__).resolve().parents[1]
MOST_JOBS = 14  # each holds a CUDA context and its own copy of the models
SHARD = "UNSPOOL_TEST_SHARD"  # "index/count", for the plugin
ALONE = "alone"  # the shard of the tests that take the whole card
REPORT = "UNSPOOL_TEST_REPORT"  # where the plugin writes what happens, one JSON object per line
PROGRESS_SECONDS = 15.0  # between two lines that say how far the tests are
NO_TESTS_COLLECTED = 5  # pytest's exit status for a shard that got nothing
Item = TypeVar("Item")


# --- inside a pytest process: the plugin ------------------------------------------------------------


def keep_share(items: Sequence[Item], shard: str) -> list[Item]:
    """Every n-th test from this shard's index on: neighbours cost about the same, so the shards do too."""
    place, count = (int(part) for part in shard.split("/"))
    return list(items[place::count])


@pytest.hookimpl(trylast=True)  # after -k and -m have taken theirs out
def pytest_collection_modifyitems(items: list[Any]) -> None:
    if shard := os.environ.get(SHARD):
        marked = [item for item in items if item.get_closest_marker("whole_card")]
        write_event(whole_card=len(marked))
        items[:] = marked if shard == ALONE else keep_share([item for item in items if item not in marked], shard)


def write_event(**event: Any) -> None:
    """A line for the process outside; each stands in the file at once, because a process may be killed at any time."""
    if path := os.environ.get(REPORT):
        with Path(path).open("a") as file:
            file.write(json.dumps(event) + "\n")


def pytest_collection_finish(session: Any) -> None:
    write_event(collected=len(session.items))


def pytest_runtest_logstart(nodeid: str) -> None:
    write_event(started=nodeid)


def pytest_runtest_logfinish(nodeid: str) -> None:
    write_event(done=nodeid)


def pytest_runtest_logreport(report: Any) -> None:
    outcome = report.outcome
    if outcome == "passed" and report.when != "call":
        return
    if outcome == "failed" and report.when != "call":
        outcome = "error"
    if hasattr(report, "wasxfail"):
        outcome = {"skipped": "xfailed", "passed": "xpassed"}.get(outcome, outcome)
    write_event(outcome=outcome, test=report.nodeid, text=report.longreprtext if report.failed else "")


def pytest_collectreport(report: Any) -> None:
    if report.failed:
        write_event(outcome="error", test=report.nodeid, text=report.longreprtext)


def pytest_sessionfinish() -> None:
    write_event(ended=True)


# --- outside: the processes -------------------------------------------------------------------------


@dataclass
class Shard:
    """One pytest process and its results so far."""

    place: int
    process: subprocess.Popen[bytes]
    log: Path
    report: Path
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[str, str]] = field(default_factory=list)
    num_collected: int | None = None
    num_done: int = 0
    num_whole_card: int = 0  # tests that were left to the last process
    running: str = ""  # the test that has started and not ended
    has_ended: bool = False
    was_stopped: bool = False
    _num_read: int = 0  # bytes of the report

    def read(self) -> None:
        """Takes in what the process has reported since the last time, and prints the failures among it."""
        if not self.report.is_file():
            return
        with self.report.open("rb") as file:
            file.seek(self._num_read)
            whole, _, _ = file.read().rpartition(b"\n")  # the last line may be half written
        self._num_read += len(whole) + bool(whole)
        for event in map(json.loads, whole.splitlines()):
            self.num_collected = event.get("collected", self.num_collected)
            self.num_done += "done" in event
            self.num_whole_card = event.get("whole_card", self.num_whole_card)
            self.running = event.get("started", "" if "done" in event else self.running)
            self.has_ended |= "ended" in event
            if outcome := event.get("outcome"):
                self.counts[outcome] += 1
                if outcome in ("failed", "error"):
                    self.failures.append((event["test"], event["text"]))
                    print(f"{outcome}: {event['test']}", flush=True)

    def settle(self) -> None:
        """Reads the rest; a process that was cut off, or failed without saying where, is a failure itself."""
        self.read()
        status = self.process.returncode
        if self.has_ended and (status in (0, NO_TESTS_COLLECTED) or self.failures):
            return
        how = "was stopped" if self.was_stopped else f"ended with status {status}"
        name = f"process {self.place} {how}" + (f" in {self.running}" if self.running else "")
        tail = "" if self.was_stopped else "\n".join(self.log.read_text(errors="replace").splitlines()[-30:])
        self.counts["error"] += 1
        self.failures.append((name, tail))

    def stop(self) -> None:
        self.was_stopped = True
        self.process.kill()
        self.process.wait()


def start(place: int, share: str, tests: list[str], options: list[str], logs: Path) -> Shard:
    log, report = logs / f"{place}.log", logs / f"{place}.jsonl"
    report.unlink(missing_ok=True)  # of another run
    paths = [str(ROOT / "src"), str(ROOT), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    own = {SHARD: share, REPORT: str(report), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-m", "pytest", *tests, "-p", Path(__file__).stem, "-p", "no:cacheprovider"]
    # The machine's own torch and triton warn of other things than the pinned ones, and its pytest has fewer plugins.
    command += ["-q", "--tb=short", "-o", "addopts=--import-mode=importlib", "-o", "filterwarnings=", *options]
    environment = {"OMP_NUM_THREADS": "1", **os.environ, **own}
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=ROOT)
    return Shard(place, process, log, report)


@contextmanager
def catching_signals() -> Iterator[list[int]]:
    """The signals that asked this process to end, Ctrl-C's and `kill`'s, so that what is known can still be printed."""
    caught: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, lambda number, _: caught.append(number))
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def wait(shards: list[Shard], limit: float) -> None:
    """Wait until all have ended, and print how far they are; the limit or a signal stops those that still run."""
    begun = told = time.monotonic()
    running = list(shards)
    try:
        with catching_signals() as signals:
            while running:
                for shard in running:
                    shard.read()
                now = time.monotonic()
                if signals or now - begun > limit:
                    reason = signal.Signals(signals[0]).name if signals else f"the limit of {limit:g} s"
                    print(f"{reason} stops the processes that still run: {len(running)}", flush=True)
                    for shard in running:
                        shard.stop()
                for shard in [shard for shard in running if shard.process.poll() is not None]:
                    running.remove(shard)
                    shard.settle()
                    print(f"process {shard.place}: {describe(shard.counts)}", flush=True)
                if now - told > PROGRESS_SECONDS:
                    told = now
                    print(describe_progress(shards, now - begun), flush=True)
                time.sleep(0.05)
    finally:
        for shard in running:  # none, unless something is wrong here
            shard.stop()


def describe_progress(shards: list[Shard], seconds: float) -> str:
    done, failed = sum(shard.num_done for shard in shards), sum(len(shard.failures) for shard in shards)
    numbers = [shard.num_collected for shard in shards if shard.num_collected is not None]
    total = f"{sum(numbers):,}" if len(numbers) == len(shards) else "those still being collected"
    return f"{seconds:.0f} s: {done:,} tests of {total}, {failed:,} failed"


def describe(counts: Counter[str]) -> str:
    return ", ".join(f"{number} {outcome}" for outcome, number in counts.items() if number) or "nothing to run"


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def count_jobs() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MOST_JOBS, cores - 2))


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="*", help="files, folders or test ids (tests/gpu)")
    parser.add_argument("--jobs", type=int, default=count_jobs(), help="processes (cores less two, at most 14)")
    parser.add_argument("--limit", type=float, default=540, help="seconds until what still runs is stopped (540)")
    parser.add_argument("--logs", type=Path, help="where logs go (a new temporary folder)")
    words = sys.argv[1:] if words is None else words
    cut = words.index("--") if "--" in words else len(words)
    arguments, options = parser.parse_args(words[:cut]), words[cut + 1 :]
    if arguments.jobs < 1 or not arguments.limit > 0:
        parser.error("--jobs and --limit are at least 1")
    if "TRITON_INTERPRET" not in os.environ and not has_gpu():
        print("no CUDA device here: the GPU tests were not run")
        return 0

    logs = arguments.logs or Path(tempfile.mkdtemp(prefix="gpu_tests_"))
    logs.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    tests, jobs = arguments.tests or ["tests/gpu"], arguments.jobs
    shards = [start(place, f"{place}/{jobs}", tests, options, logs) for place in range(jobs)]
    wait(shards, arguments.limit)
    if any(shard.num_whole_card for shard in shards) and not any(shard.was_stopped for shard in shards):
        shards.append(start(jobs, ALONE, tests, options, logs))
        wait(shards[-1:], max(1.0, arguments.limit - (time.monotonic() - begun)))
    failures = [failure for shard in shards for failure in shard.failures]
    for name, text in failures:
        print(f"\n--- {name}\n{text}")
    total = sum((shard.counts for shard in shards), Counter[str]())
    print(f"\n{describe(total)} in {time.monotonic() - begun:.0f} s, {arguments.jobs} processes; logs: {logs}")
    for name, _ in failures:
        print(f"FAILED {name}")
    return 1 if failures or not total else 0


if __name__ == "__main__":
    sys.exit(main())
