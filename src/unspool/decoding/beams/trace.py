"""The trace of a beam search: what every step looked at, what went on, what ended, and what was returned."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from unspool.decoding.beams.trace_fields import Fields, read_json
from unspool.decoding.observer import Observer
from unspool.errors import InputError

IMPOSSIBLE = -5e8  # a log-probability below this is of a beam that does not exist, or of a token that can't come
FORMAT = "unspool beam trace"
VERSION = 1
MOST_STEPS = 1_048_576
MOST_CANDIDATES = 65_536  # of one step
LARGEST_ID = 2**31 - 1
_DIGITS = 6  # behind the point: what float32 sums of log-probabilities hold


@dataclass(frozen=True, slots=True)
class Candidate:
    """A continuation that a step looked at."""

    token: int
    parent: int  # the beam it continues, within its prompt
    sum_logprobs: float  # of its whole sequence, after the processors; -inf where it could not come
    reason: str | None  # why its sequence would end here; None if it goes on


@dataclass(slots=True)
class TraceStep:
    """One prompt's candidates at one step (of one group, if there are groups), and what became of them."""

    prompt: int
    step: int  # from 1 on: how many tokens the candidates' sequences have
    candidates: list[Candidate]
    kept: list[int]  # places of the candidates that became the next beams, in their order
    group: int = 0
    finished: dict[int, float] = field(default_factory=dict)  # place and score of those that ended among the best


@dataclass(frozen=True, slots=True)
class Returned:
    """A sequence that was returned: where its last token is in the trace, its score, and why it ended."""

    prompt: int
    step: int
    group: int
    place: int
    score: float
    reason: str


@dataclass(slots=True)
class BeamTrace:
    """Every step's candidates (token, log-probability, parent, kept or dropped, finished), and what was returned."""

    num_beams: int
    num_groups: int = 1
    steps: list[TraceStep] = field(default_factory=list)
    returned: list[Returned] = field(default_factory=list)  # by prompt, best first
    observer: Observer | None = field(default=None, repr=False, compare=False)  # sees steps as they are noted
    keeps_all: bool = field(default=True, repr=False, compare=False)  # otherwise each search's last step alone

    @property
    def num_prompts(self) -> int:
        """How many prompts were searched for."""
        return 1 + max((step.prompt for step in self.steps), default=-1)

    def note(
        self,
        prompt: int,
        step: int,
        candidates: Sequence[Candidate],
        kept: Sequence[int],
        *,
        group: int = 0,
        finished: dict[int, float] | None = None,
    ) -> None:
        """Add a step of one prompt."""
        rounded = [Candidate(one.token, one.parent, _round(one.sum_logprobs), one.reason) for one in candidates]
        scores = {place: _round(score) for place, score in (finished or {}).items()}
        noted = TraceStep(prompt, step, rounded, list(kept), group, scores)
        if not self.keeps_all:
            self.steps = [one for one in self.steps if (one.prompt, one.group) != (prompt, group)]
        self.steps.append(noted)
        if self.observer is not None:
            self.observer.see(noted)

    def note_returned(self, prompt: int, step: int, place: int, score: float, reason: str, *, group: int = 0) -> None:
        """Add a sequence that is returned, the best of its prompt first."""
        noted = Returned(prompt, step, group, place, round(score, _DIGITS), reason)
        if self.observer is not None:
            self.observer.see(noted)
        self.returned.append(noted)
        self.returned.sort(key=lambda one: one.prompt)  # prompts end in any order

    def follow(self, returned: Returned) -> list[Candidate]:
        """The candidates that a returned sequence is made of, from its first token to its last."""
        own = {one.step: one for one in self.steps if (one.prompt, one.group) == (returned.prompt, returned.group)}
        first_beam = returned.group * (self.num_beams // self.num_groups)
        path = [own[returned.step].candidates[returned.place]]
        for number in range(returned.step - 1, 0, -1):
            path.append(own[number].candidates[own[number].kept[path[-1].parent - first_beam]])
        return path[::-1]

    # --- as plain values -------------------------------------------------------------------------------
    def to_dict(self) -> dict[str, Any]:
        """The trace as plain values for JSON: a column for each property of a step's candidates."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "num_beams": self.num_beams,
            "num_groups": self.num_groups,
            "steps": [_describe_step(step) for step in self.steps],
            "returned": [
                [one.prompt, one.step, one.group, one.place, _as_json(one.score), one.reason] for one in self.returned
            ],
        }

    def to_json(self) -> str:
        """The trace as one line of JSON."""
        return json.dumps(self.to_dict(), ensure_ascii=False, allow_nan=False, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> BeamTrace:
        """The trace that `to_json` wrote."""
        return cls.from_dict(read_json(text))

    @classmethod
    def from_dict(cls, values: Any) -> BeamTrace:
        """The trace that `to_dict` describes; anything that could not have come from it is an InputError."""
        fields = Fields(values, "the trace")
        if fields.take("format") != FORMAT or fields.take("version") != VERSION:
            raise InputError(f"this is no {FORMAT} of version {VERSION}; BeamTrace.to_dict() and to_json() write one")
        num_beams = fields.integer("num_beams", 1, MOST_CANDIDATES)
        num_groups = fields.integer("num_groups", 1, num_beams)
        if num_beams % num_groups:
            raise InputError(f"the trace has {num_beams} beams in {num_groups} groups, which can't be of one size")
        steps = [_read_step(one, num_beams, num_groups) for one in fields.items("steps", MOST_STEPS)]
        returned = [_read_returned(one) for one in fields.items("returned", MOST_STEPS)]
        trace = cls(num_beams, num_groups, steps, returned)
        _check_order(trace)
        return trace


def _round(value: float) -> float:
    return -math.inf if value <= IMPOSSIBLE else round(value, _DIGITS)


def _as_json(value: float) -> float | None:
    return value if math.isfinite(value) else None  # JSON has no infinities


def _describe_step(step: TraceStep) -> dict[str, Any]:
    columns: dict[str, Any] = {"prompt": step.prompt, "step": step.step, "group": step.group}
    columns["tokens"] = [one.token for one in step.candidates]
    columns["parents"] = [one.parent for one in step.candidates]
    columns["sum_logprobs"] = [_as_json(one.sum_logprobs) for one in step.candidates]
    columns["reasons"] = [[place, one.reason] for place, one in enumerate(step.candidates) if one.reason is not None]
    columns["kept"] = step.kept
    columns["finished"] = [[place, _as_json(score)] for place, score in step.finished.items()]
    return columns


def _read_step(values: Any, num_beams: int, num_groups: int) -> TraceStep:
    fields = Fields(values, "a step of the trace")
    group, size = fields.integer("group", 0, num_groups - 1), num_beams // num_groups
    tokens = fields.integers("tokens", MOST_CANDIDATES, 0, LARGEST_ID)
    parents = fields.integers("parents", MOST_CANDIDATES, group * size, (group + 1) * size - 1)
    sums = fields.numbers("sum_logprobs", MOST_CANDIDATES)
    if not len(tokens) == len(parents) == len(sums):
        raise InputError(f"a step of the trace has {len(tokens)} tokens, {len(parents)} parents, {len(sums)} sums")
    last = len(tokens) - 1
    reasons = fields.pairs("reasons", last, "text")
    kept = fields.integers("kept", size, 0, last)
    if len(set(kept)) < len(kept):
        raise InputError("a step of the trace keeps one candidate twice")
    return TraceStep(
        prompt=fields.integer("prompt", 0, LARGEST_ID),
        step=fields.integer("step", 1, MOST_STEPS),
        candidates=[
            Candidate(token, parent, total, reasons.get(place))
            for place, (token, parent, total) in enumerate(zip(tokens, parents, sums, strict=True))
        ],
        kept=kept,
        group=group,
        finished=fields.pairs("finished", last, "number"),
    )


def _read_returned(values: Any) -> Returned:
    names = ("prompt", "step", "group", "place", "score", "reason")
    if not isinstance(values, list) or len(values) != len(names):
        raise InputError(f"a returned sequence of the trace must be the list [{', '.join(names)}]")
    fields = Fields(dict(zip(names, values, strict=True)), "a returned sequence of the trace")
    prompt, step, group, place = (fields.integer(name, 0, LARGEST_ID) for name in names[:4])
    return Returned(prompt, step, group, place, fields.number("score"), fields.text("reason"))


def _check_order(trace: BeamTrace) -> None:
    """Every prompt's steps (of every group) must follow one another, each beam from one that was kept."""
    size = trace.num_beams // trace.num_groups
    last: dict[tuple[int, int], TraceStep] = {}
    num_candidates: dict[tuple[int, int, int], int] = {}
    for one in trace.steps:
        before = last.get((one.prompt, one.group))
        if one.step != (1 if before is None else before.step + 1):
            raise InputError(f"step {one.step} of prompt {one.prompt} is out of its order in the trace")
        if before is not None:
            for candidate in one.candidates:
                if candidate.parent - one.group * size >= len(before.kept):
                    raise InputError(f"step {one.step} continues beam {candidate.parent}, which was not kept before")
        last[one.prompt, one.group] = one
        num_candidates[one.prompt, one.group, one.step] = len(one.candidates)
    for end in trace.returned:
        if end.place >= num_candidates.get((end.prompt, end.group, end.step), 0):
            raise InputError(f"the trace returns candidate {end.place} of step {end.step}, which it does not have")
