"""The tests that need a GPU, in several processes at once: one process leaves the device idle most of the time.

    python tools/gpu_tests.py                                   all of tests/gpu
    python tools/gpu_tests.py --jobs 4 tests/gpu/test_caches.py -- -k quantized
    make gpu JOBS=4 TESTS=tests/gpu/test_caches.py              the same, with the python at hand

Needs nothing but pytest. Each process collects all tests and keeps every n-th one, for which this file is also its
plugin. Logs stay in the folder that is named at the end. On an H200 14 processes ran
1,632 tests in 194 s (2026-11-15).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest

ROOT = Path(__file__).resolve().parents[1]
MOST_JOBS = 14  # each holds a CUDA context and its own copy of the models
SHARD = "UNSPOOL_TEST_SHARD"  # "index/count", for the plugin
REPORT = "UNSPOOL_TEST_REPORT"  # where the plugin writes its results
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
        items[:] = keep_share(items, shard)


def pytest_runtest_logreport(report: Any) -> None:
    if report.failed and os.environ.get(REPORT):  # a process that is stopped at the limit writes no summary
        print(f"\nfailed: {report.nodeid}\n{report.longreprtext[-2000:]}", flush=True)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if path := os.environ.get(REPORT):
        stats = terminalreporter.stats
        counts = {
            outcome: len(stats.get(outcome, [])) for outcome in ("passed", "failed", "error", "skipped", "xfailed")
        }
        failures = [[report.nodeid, report.longreprtext] for report in stats.get("failed", []) + stats.get("error", [])]
        Path(path).write_text(json.dumps({"counts": counts, "failures": failures}))


# --- outside: the processes -------------------------------------------------------------------------


@dataclass
class Shard:
    """One pytest process and its results."""

    place: int
    process: subprocess.Popen[bytes]
    log: Path
    report: Path
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[str, str]] = field(default_factory=list)

    def settle(self) -> None:
        """Reads the report; a process that left none, or failed without saying where, is a failure itself."""
        status = self.process.returncode
        if self.report.is_file():
            results = json.loads(self.report.read_text())
            self.counts.update(results["counts"])
            self.failures = [(name, text) for name, text in results["failures"]]
        if not self.report.is_file() or (status not in (0, NO_TESTS_COLLECTED) and not self.failures):
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-30:])
            self.counts["error"] += 1
            self.failures.append((f"process {self.place} ended with status {status}", tail))


def start(place: int, jobs: int, tests: list[str], options: list[str], logs: Path) -> Shard:
    log, report = logs / f"{place}.log", logs / f"{place}.json"
    report.unlink(missing_ok=True)  # of another run
    paths = [str(ROOT / "src"), str(ROOT), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    own = {SHARD: f"{place}/{jobs}", REPORT: str(report), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-m", "pytest", *tests, "-p", Path(__file__).stem, "-p", "no:cacheprovider"]
    # The machine's own torch and triton warn of other things than the pinned ones, and its pytest has fewer plugins.
    command += ["-q", "--tb=short", "-o", "addopts=--import-mode=importlib", "-o", "filterwarnings=", *options]
    environment = {"OMP_NUM_THREADS": "1", **os.environ, **own}
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=ROOT)
    return Shard(place, process, log, report)


def wait(shards: list[Shard], limit: float) -> None:
    """Wait until all have ended, and print each result; those past the limit are killed, and all of them on Ctrl-C."""
    end = time.monotonic() + limit
    running = list(shards)
    try:
        while running:
            for shard in [shard for shard in running if shard.process.poll() is not None]:
                running.remove(shard)
                shard.settle()
                print(f"process {shard.place}: {describe(shard.counts)}", flush=True)
            if running and time.monotonic() > end:
                print(f"processes that ran past {limit:g} s and are stopped: {len(running)}", flush=True)
                for shard in running:
                    shard.process.kill()
                    shard.process.wait()
                end += limit
            time.sleep(0.05)
    finally:
        for shard in running:
            shard.process.kill()
            shard.process.wait()


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
    shards = [
        start(place, arguments.jobs, arguments.tests or ["tests/gpu"], options, logs) for place in range(arguments.jobs)
    ]
    wait(shards, arguments.limit)
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
