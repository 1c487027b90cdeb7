"""The engine's own scheduler on a simulated clock: `python benchmarks/simulate.py --requests 1000000`.

Requests arrive (Poisson, in bursts, or as a file says), a router hands each to a replica, and every replica runs
`unspool.engine.scheduler.Scheduler` over a pool of blocks: who is admitted, reads, decodes and goes back to the queue
is decided by the code that decides it in the engine. Only the passes are made up: one takes
`base + per_row * rows + per_key * keys + per_token * prompt tokens`, with figures that were fitted to
docs/performance.md (MACHINES). Replicas may fail; what they had goes back to the router and begins again.

    --loads 0.5 0.7 0.9      one run for each load, as a part of what the replicas can do; a chart of latencies
    --arrivals FILE          lines of `seconds prompt_tokens new_tokens`; else poisson or bursts
    --prompt, --new          lengths: 512, 64:1024 (uniform) or lognormal:300:0.8 (median and sigma)

Prints utilisation, throughput, latency and time to the first token (p50, p99), preemptions, failures and what the
simulation itself took. Every figure follows from --seed.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import random
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

from unspool.engine.scheduler import Entry, Limits, Scheduler, State

BLOCK = 64  # positions, as the engine's default
_LONGEST = 1 << 20  # tokens of a prompt or an answer


class Machine(NamedTuple):
    """What a pass costs on a machine with a model, in milliseconds, and how much fits."""

    base: float  # reading the weights
    per_row: float
    per_key: float  # a position of a row that decodes
    per_token: float  # a prompt's
    max_rows: int
    blocks: int
    tokens_per_pass: int


# Fitted to docs/performance.md: steps at 1 and 64 rows ("The step on an H200", "Decoding on a CPU"), what attention
# adds with keys, and the rest of "The engine"'s work for prompts. Blocks: what the engine takes there by default.
MACHINES = {
    "h200-8b": Machine(3.75, 0.010, 3.25e-5, 0.026, 256, 12_700, 16_384),
    "h200-1b": Machine(0.72, 0.0067, 8.0e-6, 0.005, 256, 16_384, 16_384),
    "cpu-135m": Machine(2.64, 1.72, 3.8e-3, 2.08, 32, 2_048, 512),
}


# --- what arrives ---------------------------------------------------------------------------------------------------
class Arrival(NamedTuple):
    """A request: when it comes, and how long it is."""

    at: float
    prompt: int
    new: int


def read_lengths(text: str, rng: random.Random) -> Iterator[int]:
    """Lengths without end: fixed, uniform between two, or lognormal by median and sigma."""
    if text.startswith("lognormal:"):
        median, sigma = (float(part) for part in text.split(":")[1:])
        middle = math.log(median)
        while True:
            yield min(_LONGEST, max(1, round(rng.lognormvariate(middle, sigma))))
    low, _, high = text.partition(":")
    least, most = int(low), int(high or low)
    if not 1 <= least <= most <= _LONGEST:
        raise SystemExit(f"lengths are from 1 to {_LONGEST}, not {text!r}")
    while True:
        yield rng.randint(least, most)


def make_arrivals(count: int, rate: float, prompt: str, new: str, seed: int, burst: float = 1.0) -> list[Arrival]:
    """Requests at `rate` a second; with `burst` above 1 a tenth of the time has so many times the rate of the rest."""
    rng = random.Random(seed)
    prompts, news = read_lengths(prompt, random.Random(seed + 1)), read_lengths(new, random.Random(seed + 2))
    quiet = rate / (0.9 + 0.1 * burst)
    at, is_burst, until, made = 0.0, False, 0.0, list[Arrival]()
    while len(made) < count:
        if burst > 1 and at >= until:
            is_burst = not is_burst if made else False
            until = at + rng.expovariate(1 / (1.0 if is_burst else 9.0))
        at += rng.expovariate((quiet * burst if is_burst else quiet) if burst > 1 else rate)
        made.append(Arrival(at, next(prompts), next(news)))
    return made


def read_arrivals(path: Path) -> list[Arrival]:
    """Requests of a file: seconds, tokens of the prompt, new tokens on each line."""
    made = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            at, prompt, new = line.replace(",", " ").split()
            one = Arrival(float(at), int(prompt), int(new))
        except ValueError as error:
            raise SystemExit(f"{path}, line {number}: `seconds prompt_tokens new_tokens`, not {line[:80]!r}") from error
        if not (math.isfinite(one.at) and one.at >= 0 and 1 <= one.prompt <= _LONGEST and 1 <= one.new <= _LONGEST):
            raise SystemExit(f"{path}, line {number}: a time and lengths from 1 to {_LONGEST}, not {line[:80]!r}")
        made.append(one)
    return sorted(made)


# --- a replica ------------------------------------------------------------------------------------------------------
class Pool:
    """The blocks of a replica, as its scheduler sees them."""

    block_size = BLOCK

    def __init__(self, replica: Replica, num_blocks: int) -> None:
        self._replica, self.free = replica, num_blocks

    def has(self, count: int) -> bool:
        """Whether so many blocks can be taken now."""
        return count <= self.free

    def release(self, number: int) -> None:
        """Take an entry's blocks: it will read its text again."""
        self._replica.give_up(number)


class Replica:
    """An engine: its scheduler, and what its rows hold."""

    def __init__(self, machine: Machine, book: Book, max_waiting: int) -> None:
        self.machine, self._book = machine, book
        self._pool = Pool(self, machine.blocks)
        limits = Limits(machine.max_rows, machine.blocks, machine.tokens_per_pass, max_waiting)
        self.scheduler = Scheduler(limits, self._pool)
        self._steps = 0  # that running rows have taken
        self._keys = 0  # positions of rows that run
        self._due = [0] * BLOCK  # rows that take a block with the step of that number, modulo the size
        self._running: dict[int, tuple[int, int, int]] = {}  # a row's first step, its length then, and its last step
        self._ends: defaultdict[int, list[int]] = defaultdict(list)  # rows by their last step
        self._left: dict[int, int] = {}  # tokens that are still to come
        self._reads: dict[int, int] = {}
        self.is_busy, self.is_up = False, True
        self.busy_seconds = 0.0

    def __len__(self) -> int:
        return len(self.scheduler)

    @property
    def num_running(self) -> int:
        """Rows that decode."""
        return len(self._running)

    def add(self, number: int, request: Arrival, now: float) -> bool:
        """Put a request into the queue; False if there is no room, or never will be."""
        entry = Entry(number, 1, unread=request.prompt, length=request.prompt, arrived=now)
        entry.reserve = -(-(request.prompt + request.new) // BLOCK)
        if self.scheduler.is_full or self.scheduler.explain_refusal(entry) is not None:
            return False
        self._left[number] = request.new
        self.scheduler.add(entry)
        return True

    def begin(self, now: float) -> float | None:
        """Begin a pass; when it ends, or None if there is nothing to do."""
        turn = self.scheduler.plan(now)
        self._book.preemptions += len(turn.preempted)
        self._reads = turn.reads
        rows, tokens = len(self._running), sum(turn.reads.values())
        self.is_busy = bool(rows or tokens)
        if not self.is_busy:
            return None
        cost = self.machine
        seconds = cost.base + cost.per_row * rows + cost.per_key * self._keys + cost.per_token * tokens
        self.busy_seconds += seconds / 1000
        self._book.note_pass(now, seconds / 1000, rows, tokens, self.scheduler.num_waiting)
        return now + seconds / 1000

    def end(self, now: float) -> None:
        """End a pass: rows have a token more, prompts are read."""
        rows = len(self._running)
        if rows:
            self._pool.free -= self._due[self._steps % BLOCK]
            self.scheduler.note_step()
            self._steps += 1
            self._keys += rows
            for number in self._ends.pop(self._steps, ()):
                if number in self._running and self._running[number][2] == self._steps:  # it was not sent back
                    self._finish(number, now)
        for number, columns in self._reads.items():
            self._read(number, columns, now)

    def _read(self, number: int, columns: int, now: float) -> None:
        scheduler, entry = self.scheduler, self.scheduler[number]
        read = entry.length - entry.unread + columns
        held = -(-read // BLOCK)
        self._pool.free -= held - entry.held
        entry.held = held
        scheduler.note_read(number, columns)
        if entry.state is not State.RUNNING:
            return
        self._book.note_token(number, now)
        self._left[number] -= 1
        last = self._steps + self._left[number]
        self._running[number] = self._steps, entry.length, last
        self._keys += entry.length
        self._due[(self._steps - entry.length) % BLOCK] += 1
        if self._left[number] == 0:
            self._finish(number, now)
        else:
            self._ends[last].append(number)

    def _leave(self, number: int) -> int:
        """Take a row out of the steps; how many positions it has."""
        began, length, _ = self._running.pop(number)
        self._due[(began - length) % BLOCK] -= 1
        taken = self._steps - began
        self._keys -= length + taken
        self._pool.free += -(-(length + taken) // BLOCK)
        self._left[number] -= taken
        return length + taken

    def _finish(self, number: int, now: float) -> None:
        self._leave(number)
        del self._left[number]
        self.scheduler.end(number)
        self._book.note_done(number, now)

    def give_up(self, number: int) -> None:
        """Give back what a row holds; it will read its text again."""
        entry = self.scheduler[number]
        if number in self._running:
            entry.length = self._leave(number) + 1  # the last token was not read yet
        else:
            self._pool.free += entry.held
        entry.unread, entry.held = entry.length, 0

    def fail(self) -> list[int]:
        """Lose everything; the requests that it had."""
        had = list(self._left)
        self._pool.free = self.machine.blocks
        self.scheduler = Scheduler(self.scheduler.limits, self._pool)
        self._running, self._left, self._reads = {}, {}, {}
        self._ends.clear()
        self._due, self._steps, self._keys = [0] * BLOCK, 0, 0
        self.is_busy = self.is_up = False
        return had

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody holds."""
        return self._pool.free


# --- what happened --------------------------------------------------------------------------------------------------
@dataclass
class Book:
    """What is noted while a simulation runs."""

    requests: Sequence[Arrival]
    width: float  # seconds of a slice of the chart
    firsts: dict[int, float] = field(default_factory=dict)
    latencies: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)  # to the first token
    between: list[float] = field(default_factory=list)  # tokens of a request, on average
    new_tokens: int = 0
    prompt_tokens: int = 0  # that were read, again after a preemption too
    preemptions: int = 0
    retried: int = 0
    refused: int = 0
    failures: int = 0
    passes: int = 0
    row_passes: int = 0
    slices: dict[int, list[float]] = field(default_factory=dict)  # busy seconds, rows and waiting times seconds

    def note_pass(self, now: float, seconds: float, rows: int, tokens: int, waiting: int) -> None:
        """Count a pass."""
        self.passes += 1
        self.row_passes += rows
        self.prompt_tokens += tokens
        one = self.slices.setdefault(int(now / self.width), [0.0, 0.0, 0.0])
        one[0] += seconds
        one[1] += rows * seconds
        one[2] += waiting * seconds

    def note_token(self, number: int, now: float) -> None:
        """Note a first token; one that comes again after a preemption is not the first."""
        self.firsts.setdefault(number, now)

    def note_done(self, number: int, now: float) -> None:
        """Note a request's end."""
        request = self.requests[number]
        first = self.firsts.pop(number)
        self.latencies.append(now - request.at)
        self.waits.append(first - request.at)
        if request.new > 1:
            self.between.append((now - first) / (request.new - 1))
        self.new_tokens += request.new


@dataclass(frozen=True)
class Result:
    """What a simulation found."""

    requests: int
    done: int
    refused: int
    replicas: int
    seconds: float  # of the simulated clock
    utilisation: float  # part of the time in which replicas that are up compute
    rows: float  # that a pass decodes, on average
    tokens_per_second: float
    latency_p50: float
    latency_p99: float
    latency_mean: float
    first_p50: float
    first_p99: float
    between_p50: float
    between_p99: float
    preemptions: int
    failures: int
    retried: int
    passes: int
    took: float  # processor seconds of this machine


def find_part(values: Sequence[float], part: float) -> float:
    """A percentile of values that are sorted; 0 if there are none."""
    return values[min(len(values) - 1, int(part * len(values)))] if values else 0.0


class Simulation:
    """Replicas, a router and a clock."""

    def __init__(
        self,
        machine: Machine,
        requests: Sequence[Arrival],
        *,
        replicas: int = 1,
        router: str = "two",
        failure_hours: float = 0.0,
        repair_seconds: float = 60.0,
        max_waiting: int = 4096,
        seed: int = 0,
    ) -> None:
        span = requests[-1].at if requests else 1.0
        self.book = Book(requests, max(span / 200, 1e-3))
        self.replicas = [Replica(machine, self.book, max_waiting) for _ in range(replicas)]
        self._requests, self._router = requests, router
        self._rng, self._chance = random.Random(seed + 3), random.Random(seed + 4)
        self._mean_life, self._repair = failure_hours * 3600, repair_seconds
        self._events: list[tuple[float, int, str, int]] = []  # when, a number, what, and which replica
        self._count, self._turn = 0, 0
        self._up = list(range(replicas))
        self._homeless: list[int] = []  # requests that came while no replica was up
        self._generation = [0] * replicas  # of a replica: what was to end before it failed does not
        self._up_seconds, self._up_since = 0.0, [0.0] * replicas

    def run(self) -> Result:
        """Let all requests come and end."""
        started, now, place = time.process_time(), 0.0, 0
        if self._mean_life:
            for which in range(len(self.replicas)):
                self._push(self._chance.expovariate(1 / self._mean_life), "fail", which)
        requests, events = self._requests, self._events
        while len(self.book.latencies) + self.book.refused < len(requests):
            if place < len(requests) and (not events or requests[place].at <= events[0][0]):
                now = requests[place].at
                self._route(place, now)
                place += 1
                continue
            now, _, what, which = heapq.heappop(events)
            self._handle(now, what, which)
        return self._sum_up(now, time.process_time() - started)

    def _push(self, at: float, what: str, which: int) -> None:
        self._count += 1
        heapq.heappush(self._events, (at, self._count, what, which))

    def _handle(self, now: float, what: str, which: int) -> None:
        replica = self.replicas[which]
        if what == "fail":
            self._fail(now, which)
        elif what == "repair":
            replica.is_up, self._up_since[which] = True, now
            self._up = sorted([*self._up, which])
            self._push(now + self._chance.expovariate(1 / self._mean_life), "fail", which)
            homeless, self._homeless = self._homeless, []
            for number in homeless:
                self._route(number, now)
        elif what == f"pass {self._generation[which]}":
            replica.end(now)
            self._begin(which, now)

    def _fail(self, now: float, which: int) -> None:
        self.book.failures += 1
        self._generation[which] += 1
        self._up_seconds += now - self._up_since[which]
        self._up.remove(which)
        had = self.replicas[which].fail()
        self.book.retried += len(had)
        for number in had:
            self.book.firsts.pop(number, None)  # the client is told of an error, or of nothing yet: it asks again
            self._route(number, now)
        self._push(now + self._repair, "repair", which)

    def _route(self, number: int, now: float) -> None:
        """Hand a request to a replica: the emptier of two, of all, or the next."""
        up = self._up
        if not up:
            self._homeless.append(number)
            return
        if self._router == "next":
            which = up[self._turn % len(up)]
            self._turn += 1
        elif self._router == "two" and len(up) > 2:
            which = min(self._rng.sample(up, 2), key=lambda place: len(self.replicas[place]))
        else:
            which = min(up, key=lambda place: len(self.replicas[place]))
        if not self.replicas[which].add(number, self._requests[number], now):
            self.book.refused += 1
        elif not self.replicas[which].is_busy:
            self._begin(which, now)

    def _begin(self, which: int, now: float) -> None:
        ends = self.replicas[which].begin(now)
        if ends is not None:
            self._push(ends, f"pass {self._generation[which]}", which)

    def _sum_up(self, now: float, took: float) -> Result:
        book = self.book
        up = self._up_seconds + sum(
            now - since for since, one in zip(self._up_since, self.replicas, strict=True) if one.is_up
        )
        busy = sum(one.busy_seconds for one in self.replicas)
        latencies, waits, between = sorted(book.latencies), sorted(book.waits), sorted(book.between)
        return Result(
            requests=len(self._requests),
            done=len(latencies),
            refused=book.refused,
            replicas=len(self.replicas),
            seconds=now,
            utilisation=busy / max(up, 1e-9),
            rows=book.row_passes / max(1, book.passes),
            tokens_per_second=book.new_tokens / max(now, 1e-9),
            latency_p50=find_part(latencies, 0.5),
            latency_p99=find_part(latencies, 0.99),
            latency_mean=sum(latencies) / max(1, len(latencies)),
            first_p50=find_part(waits, 0.5),
            first_p99=find_part(waits, 0.99),
            between_p50=find_part(between, 0.5),
            between_p99=find_part(between, 0.99),
            preemptions=book.preemptions,
            failures=book.failures,
            retried=book.retried,
            passes=book.passes,
            took=took,
        )


# --- how much a machine can do --------------------------------------------------------------------------------------
def find_capacity(machine: Machine, prompt: str, new: str, seed: int = 0) -> float:
    """Requests a second that one replica answers if there are always more: what a load of 1 is."""
    lengths = make_arrivals(max(400, 16 * machine.max_rows), 1e9, prompt, new, seed)
    simulation = Simulation(machine, lengths, max_waiting=1 << 20, seed=seed)
    simulation.run()
    ends = sorted(simulation.book.latencies)  # all came at once; beginning and end, with rows to spare, are left out
    return len(ends) // 2 / (ends[len(ends) * 3 // 4] - ends[len(ends) // 4])


# --- charts ---------------------------------------------------------------------------------------------------------
_COLOURS = ("#4338ca", "#0f8a5f", "#c2660c", "#b3261e")


def _draw(title: str, curves: dict[str, list[tuple[float, float]]], unit: str, most: float) -> str:
    """Curves over one axis, each as a part of `most`, as SVG."""
    width, left, base, height = 640.0, 60.0, 260.0, 220.0
    last = max((x for points in curves.values() for x, _ in points), default=1.0) or 1.0
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} 320" font-family="sans-serif" font-size="12">'
        f'<rect width="100%" height="100%" fill="#fff"/><text x="{left}" y="20">{title}</text>'
    ]
    for part in (0, 0.25, 0.5, 0.75, 1):
        y = base - height * part
        parts.append(
            f'<path d="M{left} {y}H{width - 20}" stroke="#ddd"/><text x="8" y="{y + 4}">{most * part:.3g}</text>'
        )
        x = left + (width - left - 20) * part
        parts.append(f'<text x="{x:.1f}" y="{base + 18}" text-anchor="middle">{last * part:.3g}</text>')
    parts.append(f'<text x="{width - 20}" y="{base + 34}" text-anchor="end">{unit}</text>')
    for number, (name, points) in enumerate(curves.items()):
        path = " ".join(
            f"{left + (width - left - 20) * x / last:.1f},{base - height * min(1.0, y / most):.1f}" for x, y in points
        )
        colour = _COLOURS[number % len(_COLOURS)]
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{left + 190 * number}" y="{base + 50}" fill="{colour}">{name}</text>')
    return "".join([*parts, "</svg>"])


def draw_time(simulation: Simulation) -> str:
    """How busy the replicas were, over the simulated time."""
    book, replicas = simulation.book, simulation.replicas
    rows = replicas[0].machine.max_rows
    points: dict[str, list[tuple[float, float]]] = {"busy": [], "rows": []}
    for place in sorted(book.slices):
        busy, running, _ = book.slices[place]
        at, whole = place * book.width, book.width * len(replicas)
        points["busy"].append((at, min(1.0, busy / whole)))
        points["rows"].append((at, running / whole / rows))
    return _draw("part of the replicas' time, and of their rows", points, "seconds", 1.0)


def draw_loads(results: Sequence[tuple[float, Result]]) -> str:
    """Latencies against load."""
    curves = {
        "first token p50": [(load, one.first_p50) for load, one in results],
        "first token p99": [(load, one.first_p99) for load, one in results],
        "whole p99": [(load, one.latency_p99) for load, one in results],
    }
    most = max(y for points in curves.values() for _, y in points)
    return _draw("seconds, by load", curves, "load", most or 1.0)


HEADER = (
    "| load | done | refused | busy | rows | tokens/s | first p50, s | first p99, s | between p50, ms | "
    "between p99, ms | whole p50, s | whole p99, s | preempted | failed | retried |"
)


def describe(load: float | None, result: Result) -> str:
    """A line of the table."""
    told = "" if load is None else f"{load:.2f}"
    return (
        f"| {told} | {result.done:,} | {result.refused:,} | {result.utilisation:.3f} | {result.rows:.1f} | "
        f"{result.tokens_per_second:,.0f} | {result.first_p50:.3f} | {result.first_p99:.3f} | "
        f"{1000 * result.between_p50:.1f} | {1000 * result.between_p99:.1f} | "
        f"{result.latency_p50:.2f} | {result.latency_p99:.2f} | {result.preemptions:,} | {result.failures:,} | "
        f"{result.retried:,} |"
    )


def main(words: Sequence[str] | None = None) -> list[tuple[float | None, Result]]:
    """Run what the options ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", choices=MACHINES, default="h200-8b")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--arrivals", default="poisson", help="poisson, bursts, or a file")
    parser.add_argument("--burst", type=float, default=5.0, help="times the rate of quiet times")
    parser.add_argument("--rate", type=float, help="requests a second, in the place of --loads")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.8])
    parser.add_argument("--prompt", default="lognormal:400:0.8")
    parser.add_argument("--new", default="lognormal:180:0.7")
    parser.add_argument("--router", choices=("two", "least", "next"), default="two")
    parser.add_argument("--failure-hours", type=float, default=0.0, help="a replica's mean life; 0: for ever")
    parser.add_argument("--repair-seconds", type=float, default=60.0)
    parser.add_argument("--max-waiting", type=int, default=4096)
    parser.add_argument("--blocks", type=int, help="of each replica, in the place of the machine's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--chart", type=Path, help="an .svg file")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(words)
    machine = MACHINES[options.machine]
    if options.blocks is not None:
        machine = machine._replace(blocks=options.blocks)
    lengths = (options.prompt, options.new)
    from_file = options.arrivals not in ("poisson", "bursts")
    capacity = 0.0 if from_file else find_capacity(machine, *lengths, seed=options.seed) * options.replicas
    loads: list[float | None] = [None] if from_file or options.rate is not None else list(options.loads)
    if capacity:
        print(f"{options.machine}: {options.replicas} replicas answer {capacity:,.2f} requests a second")
    print(HEADER + "\n" + "|---" * (HEADER.count("|") - 1) + "|")
    results: list[tuple[float | None, Result]] = []
    for load in loads:
        if from_file:
            requests = read_arrivals(Path(options.arrivals))
        else:
            rate = options.rate if load is None else load * capacity
            burst = options.burst if options.arrivals == "bursts" else 1.0
            requests = make_arrivals(options.requests, rate, *lengths, options.seed, burst)
        simulation = Simulation(
            machine,
            requests,
            replicas=options.replicas,
            router=options.router,
            failure_hours=options.failure_hours,
            repair_seconds=options.repair_seconds,
            max_waiting=options.max_waiting,
            seed=options.seed,
        )
        result = simulation.run()
        results.append((load, result))
        print(describe(load, result), flush=True)
    told = results[-1][1]
    print(f"{told.seconds:,.0f} simulated seconds, {told.passes:,} passes, in {told.took:.1f} s of processor time")
    if options.chart is not None:
        known = [(load, one) for load, one in results if load is not None]
        options.chart.write_text(draw_loads(known) if len(known) > 1 else draw_time(simulation))
    if options.json is not None:
        options.json.write_text(json.dumps([{"load": load, **asdict(one)} for load, one in results], indent=1))
    return results


if __name__ == "__main__":
    main()
