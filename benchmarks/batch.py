"""`unspool batch` beside the engine alone, static batches and one Ray actor: `python benchmarks/batch.py`.

2,000 prompts of 4 to 160 words with 8 to 96 new tokens each, greedy and without ends, so that every way writes the same
number of tokens. Ways take turns, `--rounds` times after a round that counts for nothing; the fastest round of each
counts. No round's prompts begin as another's do.

- engine: `engine.generate(prompts, in_order=False)`, texts in memory
- batch: a file read, answered and written by `unspool.batch.job.Job`, on the same engine
- static: `lm.generate` over batches of as many rows as the engine has, each until its longest row is done
- ray: the same file by `unspool.ray.batch.RayJob`, one actor (with `--ways … ray`; starts a cluster of its own)

`--profile` also says what a row costs on top of the engine: processor time of the thread that reads and writes.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import queue
import random
import resource
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import unspool
from unspool.batch.job import Job
from unspool.batch.output import JobOutput
from unspool.batch.sources import open_source
from unspool.engine import Engine

SETTINGS = {"temperature": 0, "ignore_eos": True}
FEW_ROWS = 64  # of the first round
WAYS = ("engine", "batch", "static", "ray")
WORDS = ("sea", "lamp", "stone", "river", "winter", "paper", "bread", "glass", "wind", "garden", "letter", "bridge")


class Work:
    """The prompts of a round."""

    def __init__(self, number: int, count: int, folder: Path) -> None:
        rng = random.Random(number)
        self.rows: list[dict[str, Any]] = [
            {
                "prompt": f"{number} {place}: " + " ".join(rng.choices(WORDS, k=rng.randint(4, 160))),
                "max_new_tokens": rng.randint(8, 96),
            }
            for place in range(count)
        ]
        self.num_tokens = sum(row["max_new_tokens"] for row in self.rows)
        self.file, self.folder = folder / f"in{number}.jsonl", folder
        self.file.write_text("".join(json.dumps(row) + "\n" for row in self.rows))
        self._outputs = 0

    def make_output(self) -> JobOutput:
        """A file that nobody has written to."""
        self._outputs += 1
        return JobOutput(self.folder / f"{self.file.stem}.out{self._outputs}.jsonl")


class Ways:
    """The ways, over one model and one engine."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.lm = unspool.load(options.model, threads=options.threads)
        self.engine = Engine(self.lm, max_rows=options.max_rows)

    def engine_alone(self, work: Work) -> int:
        """Requests submitted ahead as a batch does, results as they finish."""
        rows, tokens = iter(work.rows), 0
        done: queue.SimpleQueue[Any] = queue.SimpleQueue()
        asked, num_running = True, 0
        while asked or num_running:
            while asked and num_running < self.engine.most_ahead:
                row = next(rows, None)
                if row is None:
                    asked = False
                    break
                self.engine.submit(
                    row["prompt"], max_new_tokens=row["max_new_tokens"], do_sample=False, eos_token_id=None
                ).when_done(done.put)
                num_running += 1
            if num_running:
                tokens += len(done.get().result().token_ids[0])
                num_running -= 1
        return tokens

    def batch(self, work: Work) -> int:
        """A file in, a file out."""
        job = Job(self.lm, self.engine, open_source(work.file), work.make_output(), name="model", settings=SETTINGS)
        assert job.run() and not job.progress.failed
        return job.progress.num_tokens

    def static(self, work: Work) -> int:
        """Batch after batch."""
        tokens = 0
        for first in range(0, len(work.rows), self.options.max_rows):
            rows = work.rows[first : first + self.options.max_rows]
            longest = max(row["max_new_tokens"] for row in rows)
            self.lm.generate(
                [row["prompt"] for row in rows], max_new_tokens=longest, do_sample=False, eos_token_id=None
            )
            tokens += sum(row["max_new_tokens"] for row in rows)
        return tokens

    def ray(self, work: Work) -> int:
        """The same file by one actor. A cluster is started for every round and ended after it, since it would take time
        from the other ways: the rate beyond the first rows is what counts."""
        import ray

        from unspool.ray.batch import RayJob, RayPipeline
        from unspool.ray.cluster import connect

        pipeline = RayPipeline(
            self.options.model,
            open_source(work.file),
            name="model",
            settings=SETTINGS,
            engine={"max_rows": self.options.max_rows},
            load={"threads": self.options.threads},
        )
        connect(object_store_memory=200 << 20)
        try:
            job = RayJob(pipeline, work.make_output())
            assert job.run() and not job.progress.failed
        finally:
            ray.shutdown()
        return job.progress.num_tokens


@dataclass(frozen=True, slots=True)
class Measured:
    """One round of one way."""

    tokens: int
    seconds: float
    processor_seconds: float

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds

    def rate_beyond(self, less: Measured) -> float:
        """Tokens a second of what this round had to do more than another: starting and ending are left out."""
        return (self.tokens - less.tokens) / (self.seconds - less.seconds)


def measure(way: Callable[[Work], int], work: Work) -> Measured:
    """Do the work."""
    before, started = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    tokens = way(work)
    seconds = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert tokens == work.num_tokens, f"{tokens} tokens instead of {work.num_tokens}"
    return Measured(tokens, seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-rows", type=int, default=32)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS[:3]))
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    ways = Ways(options)
    named = {"engine": ways.engine_alone, "batch": ways.batch, "static": ways.static, "ray": ways.ray}
    found: dict[str, list[Measured]] = {name: [] for name in options.ways}
    first: dict[str, Measured] = {}
    number = 0
    with tempfile.TemporaryDirectory() as folder:
        for round_number in range(options.rounds + 1):
            for name in options.ways:
                number += 1
                work = Work(number, min(options.rows, FEW_ROWS) if round_number == 0 else options.rows, Path(folder))
                made = measure(named[name], work)
                if round_number == 0:
                    first[name] = made
                    continue
                found[name].append(made)
                print(
                    f"round {round_number}, {name}: {made.rate:,.1f} tokens/s, "
                    f"{made.processor_seconds:,.1f} s of processor time"
                )
        if options.profile:
            show_profile(ways, Work(number + 1, options.rows, Path(folder)))
    rates = {name: max(made.rate for made in rounds) for name, rounds in found.items()}
    beyond = {name: max(made.rate_beyond(first[name]) for made in rounds) for name, rounds in found.items()}
    print("\n| way | tokens/s | of the engine | beyond the first rows | of batch | processor s |")
    print("|---|---|---|---|---|---|")
    for name, rounds in found.items():
        of_engine = f"{rates[name] / rates['engine']:.3f}" if "engine" in rates else ""
        of_batch = f"{beyond[name] / beyond['batch']:.3f}" if "batch" in beyond else ""
        spent = min(made.processor_seconds for made in rounds)
        print(f"| {name} | {rates[name]:,.1f} | {of_engine} | {beyond[name]:,.1f} | {of_batch} | {spent:,.1f} |")
    if {"batch", "static"} <= rates.keys():
        print(f"\nbatch is {rates['batch'] / rates['static']:.2f} times static batches")
    if options.json is not None:
        options.json.write_text(json.dumps({"rates": rates, "beyond": beyond}, indent=1))
    ways.engine.close()


def show_profile(ways: Ways, work: Work) -> None:
    """Where the thread that reads rows and writes answers spends its time."""
    profile = cProfile.Profile()
    started = time.thread_time()
    profile.enable()
    ways.batch(work)
    profile.disable()
    spent = time.thread_time() - started
    print(f"\nbatch's own thread: {1e6 * spent / len(work.rows):,.0f} µs of processor time a row, profiled")
    pstats.Stats(profile).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
