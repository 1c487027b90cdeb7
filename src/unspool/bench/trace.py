"""Requests that arrive over time: a trace of them, run through the batch engine and, beside it, in static batches."""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from unspool.api import LanguageModel
from unspool.engine import Engine, EngineStats
from unspool.errors import SettingError
from unspool.numeric import is_number

MOST_REQUESTS: Final = 10_000
LONGEST_TRACE: Final = 3600.0  # seconds
_LARGEST_FILE: Final = 1 << 22  # bytes
_MOST_TOKENS: Final = 65_536


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """A request of a trace."""

    at: float  # seconds from the beginning
    prompt: int  # tokens
    new: int  # tokens


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """What became of one: seconds from the trace's beginning."""

    arrived: float
    first: float  # its first token was there
    ended: float
    new: int


@dataclass(frozen=True, slots=True)
class TraceReport:
    """A trace's figures."""

    about: str
    served: Sequence[ServedRequest]  # by the engine, in the order of arrival
    static: Sequence[ServedRequest]  # in static batches
    rows: int  # of both
    stats: EngineStats


def make_trace(
    num_requests: int, rate: float, longest_prompt: int, most_new: int, seed: int = 0
) -> list[TracedRequest]:
    """Random requests, whose arrivals are independent of each other at `rate` per second on average."""
    if not 1 <= num_requests <= MOST_REQUESTS:
        raise SettingError(f"--requests {num_requests} is no whole number from 1 to {MOST_REQUESTS}")
    if not is_number(rate) or not 0 < rate <= 1e6:
        raise SettingError(f"--rate {rate!r:.40} is no number of requests per second")
    order, at, trace = random.Random(seed), 0.0, []
    for _ in range(num_requests):
        trace.append(
            TracedRequest(
                at, order.randint(max(1, longest_prompt // 4), longest_prompt), order.randint(2, max(2, most_new))
            )
        )
        at += order.expovariate(rate)
    _check_end(trace)
    return trace


def read_trace(path: Path) -> list[TracedRequest]:
    """A trace from a file with one JSON object per line: {"at": seconds, "prompt": tokens, "new": tokens}."""
    try:
        if path.stat().st_size > _LARGEST_FILE:
            raise SettingError(f"--trace {str(path)!r} has more than {_LARGEST_FILE} bytes")
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(f"--trace {str(path)!r} can't be read: {error}") from error
    if not 1 <= len(lines) <= MOST_REQUESTS:
        raise SettingError(f"--trace {str(path)!r} has {len(lines)} requests; give 1 to {MOST_REQUESTS}")
    trace = sorted((_read_arrival(line, number) for number, line in enumerate(lines, 1)), key=lambda one: one.at)
    _check_end(trace)
    return trace


def _read_arrival(line: str, number: int) -> TracedRequest:
    try:
        found: Any = json.loads(line)
        at, prompt, new = found["at"], found["prompt"], found["new"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise SettingError(
            f'line {number} of --trace is not {{"at": seconds, "prompt": tokens, "new": tokens}}: {error!r:.80}'
        ) from error
    are_counts = all(type(count) is int and 1 <= count <= _MOST_TOKENS for count in (prompt, new))
    if not is_number(at) or not 0 <= at <= LONGEST_TRACE or not are_counts:
        raise SettingError(
            f"line {number} of --trace: `at` is from 0 to {LONGEST_TRACE:g} seconds, `prompt` and `new` from 1 to "
            f"{_MOST_TOKENS} tokens"
        )
    return TracedRequest(float(at), prompt, new)


def _check_end(trace: Sequence[TracedRequest]) -> None:
    if trace[-1].at > LONGEST_TRACE:
        raise SettingError(
            f"the last request would arrive after {trace[-1].at:.0f} seconds, and a trace has at most "
            f"{LONGEST_TRACE:.0f}; give fewer requests or a higher --rate"
        )


def find_prompts(trace: Sequence[TracedRequest], tokens: Sequence[int], seed: int = 0) -> list[list[int]]:
    """A prompt for every request: the story from another word on, so that no two begin alike."""
    order = random.Random(seed)
    prompts = []
    for one in trace:
        first = order.randrange(len(tokens))
        prompts.append([tokens[(first + place) % len(tokens)] for place in range(one.prompt)])
    return prompts


def serve(
    lm: LanguageModel,
    trace: Sequence[TracedRequest],
    prompts: Sequence[Sequence[int]],
    rows: int,
    progress: Callable[[str, int, int], None] | None = None,
) -> tuple[list[ServedRequest], EngineStats]:
    """Submit every request when it arrives, and see when its tokens are there."""
    with Engine(lm, max_rows=rows) as engine:
        engine.submit(list(prompts[0]), max_new_tokens=2, **_GREEDY).result()  # a first pass sets things up
        begun, requests = time.perf_counter(), []
        for number, (one, prompt) in enumerate(zip(trace, prompts, strict=True)):
            time.sleep(max(0.0, begun + one.at - time.perf_counter()))
            submitted = time.perf_counter() - begun
            requests.append((submitted, engine.submit(list(prompt), max_new_tokens=one.new, **_GREEDY)))
            if progress is not None:
                progress("engine: requests arrive", number + 1, len(trace))
        served = []
        for submitted, request in requests:
            stats = request.result().stats
            served.append(
                ServedRequest(
                    submitted,
                    submitted + stats.first_token_seconds,
                    submitted + stats.total_seconds,
                    stats.new_tokens,
                )
            )
        return served, engine.stats


def serve_statically(
    lm: LanguageModel,
    trace: Sequence[TracedRequest],
    prompts: Sequence[Sequence[int]],
    rows: int,
    progress: Callable[[str, int, int], None] | None = None,
) -> list[ServedRequest]:
    """The same without an engine: those that wait are a batch, of at most `rows`, which runs to its longest answer."""
    begun, place, served = time.perf_counter(), 0, []
    while place < len(trace):
        time.sleep(max(0.0, begun + trace[place].at - time.perf_counter()))
        now, stop = time.perf_counter() - begun, place + 1
        while stop < len(trace) and stop - place < rows and trace[stop].at <= now:
            stop += 1
        batch = trace[place:stop]
        longest = max(one.new for one in batch)
        firsts, ends, steps = [0.0] * len(batch), [0.0] * len(batch), [0] * len(batch)
        for piece in lm.stream([list(prompt) for prompt in prompts[place:stop]], max_new_tokens=longest, **_GREEDY):
            row, when = piece.row, time.perf_counter() - begun
            firsts[row] = firsts[row] or when
            if steps[row] < batch[row].new:
                steps[row] += len(piece.token_ids)
                ends[row] = when
        served += [
            ServedRequest(one.at, first, end, one.new) for one, first, end in zip(batch, firsts, ends, strict=True)
        ]
        place = stop
        if progress is not None:
            progress("static batches", place, len(trace))
    return served


_GREEDY: Final[dict[str, Any]] = {"do_sample": False, "eos_token_id": None}


@dataclass(frozen=True, slots=True)
class TraceFigures:
    """What a way of serving a trace comes to."""

    tokens_per_second: float
    first_median: float  # seconds from arrival to the first token
    first_late: float  # the same, of the slowest tenth
    between: float  # milliseconds between tokens
    seconds: float  # of the whole trace


def find_figures(served: Sequence[ServedRequest]) -> TraceFigures:
    """The figures of requests that were served."""
    firsts = sorted(one.first - one.arrived for one in served)
    between = [1e3 * (one.ended - one.first) / (one.new - 1) for one in served if one.new > 1]
    seconds = max(one.ended for one in served) - min(one.arrived for one in served)
    return TraceFigures(
        sum(one.new for one in served) / seconds,
        statistics.median(firsts),
        firsts[min(len(firsts) - 1, len(firsts) * 9 // 10)],
        statistics.median(between) if between else 0.0,
        seconds,
    )


def format_trace(report: TraceReport) -> str:
    """The figures as a table in plain text."""
    lines = [report.about, ""]
    lines.append(f"{'':<16}{'tokens/s':>12}{'first token s':>16}{'of 9 in 10':>12}{'ms a token':>12}{'whole s':>10}")
    for name, served in (("engine", report.served), ("static batches", report.static)):
        found = find_figures(served)
        lines.append(
            f"{name:<16}{found.tokens_per_second:>12,.1f}{found.first_median:>16,.3f}{found.first_late:>12,.3f}"
            f"{found.between:>12,.1f}{found.seconds:>10,.1f}"
        )
    stats = report.stats
    lines += [
        "",
        f"engine: {report.rows} rows, {stats.passes} passes, {stats.preemptions} preemptions, "
        f"{stats.prefix_hit_rate:.0%} of prompts found again",
    ]
    return "\n".join(lines)


def trace_to_json(report: TraceReport) -> str:
    """The figures and every request."""
    found = {
        "about": report.about,
        "rows": report.rows,
        "engine": asdict(find_figures(report.served)),
        "static": asdict(find_figures(report.static)),
        "requests": [asdict(one) for one in report.served],
        "static_requests": [asdict(one) for one in report.static],
    }
    return json.dumps(found, indent=1) + "\n"
