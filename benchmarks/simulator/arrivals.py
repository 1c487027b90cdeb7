"""What arrives: requests at a rate, in bursts, or as a file says."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_LONGEST = 1 << 20  # tokens of a prompt or an answer


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
