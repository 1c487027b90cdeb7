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
import math
import pstats
import queue
import random
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import unspool
from unspool.batch.job import Job
from unspool.batch.output import Output
from unspool.batch.sources import open_source
from unspool.engine import Engine

SETTINGS = {"temperature": 0, "ignore_eos": True}
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

    def make_output(self) -> Output:
        """A file that nobody has written to."""
        self._outputs += 1
        return Output(self.folder / f"{self.file.stem}.out{self._outputs}.jsonl")


class Ways:
    """The ways, over one model and one engine."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.lm = unspool.load(options.model, threads=options.threads)
        self.engine = Engine(self.lm, max_rows=options.max_rows)
        self.left_out: tuple[float, int] | None = None  # when Ray's first answers came, and their tokens

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
        """The same file by one actor. An actor is made for every round, and the time to load it is left out."""
        from unspool.ray.batch import Pipeline, RayJob

        pipeline = Pipeline(
            self.options.model,
            open_source(work.file),
            name="model",
            settings=SETTINGS,
            engine={"max_rows": self.options.max_rows},
            load={"threads": self.options.threads},
        )
        job = RayJob(pipeline, work.make_output())
        first: list[tuple[float, int]] = []

        def note(progress: Any) -> None:
            if not first:
                first.append((time.perf_counter(), progress.num_tokens))

        assert job.run(note) and not job.progress.failed
        self.left_out = first[0]
        return job.progress.num_tokens


def measure(way: Callable[[Work], int], work: Work) -> tuple[float, float]:
    """Tokens a second, NaN if all answers came at once and the first are left out, and the process' processor seconds."""
    before, started = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    tokens = way(work)
    seconds = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert tokens == work.num_tokens, f"{tokens} tokens instead of {work.num_tokens}"
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    owner: Ways = way.__self__  # type: ignore[attr-defined]
    if owner.left_out is not None:
        (at, counted), owner.left_out = owner.left_out, None  # from the first answers on, without their tokens
        if counted == tokens:
            return math.nan, spent
        return (tokens - counted) / (started + seconds - at), spent
    return tokens / seconds, spent


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
    if "ray" in options.ways:
        from unspool.ray.cluster import connect

        connect(object_store_memory=200 << 20)
    ways = Ways(options)
    named = {"engine": ways.engine_alone, "batch": ways.batch, "static": ways.static, "ray": ways.ray}
    rates: dict[str, list[float]] = {name: [] for name in options.ways}
    spent: dict[str, list[float]] = {name: [] for name in options.ways}
    number = 0
    with tempfile.TemporaryDirectory() as folder:
        for round_number in range(options.rounds + 1):
            for name in options.ways:
                number += 1
                work = Work(number, min(options.rows, 64) if round_number == 0 else options.rows, Path(folder))
                rate, seconds = measure(named[name], work)
                if round_number:
                    if math.isnan(rate):
                        raise SystemExit(f"all {options.rows} answers came from the actor at once; take more --rows")
                    rates[name].append(rate)
                    spent[name].append(seconds)
                    print(f"round {round_number}, {name}: {rate:,.1f} tokens/s, {seconds:,.1f} s of processor time")
        if options.profile:
            show_profile(ways, Work(number + 1, options.rows, Path(folder)))
    best = {name: max(found) for name, found in rates.items()}
    print("\n| way | tokens/s | of the engine | processor s |\n|---|---|---|---|")
    for name, rate in best.items():
        part = f"{rate / best['engine']:.3f}" if "engine" in best else ""
        print(f"| {name} | {rate:,.1f} | {part} | {min(spent[name]):,.1f} |")
    if {"batch", "static"} <= best.keys():
        print(f"\nbatch is {best['batch'] / best['static']:.2f} times static batches")
    if options.json is not None:
        options.json.write_text(json.dumps({"rates": rates, "processor_seconds": spent}, indent=1))
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
