"""The steps of a beam search: the live beams with their parents, what ended, and how far constraints have come."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import Any

import torch

from unspool.beams.rules import prepare_constraints
from unspool.constraints import Constraint, ConstraintListState
from unspool.constraints.distance import describe_constraint, list_phrases
from unspool.decoding.beams.trace import Candidate, Returned, TraceStep
from unspool.decoding.observer import Scored
from unspool.plan import Plan
from unspool.trace.values import Show, shorten

NOT_LIVE = -1
_MOST_PHRASES = 8  # alternatives that are shown


class BeamSteps:
    """Follows one prompt's beams. A beam has a slot (its place in the search) and, in an event, an index."""

    def __init__(self, plan: Plan, vocab_size: int, prompt: Sequence[int], show: Show) -> None:
        settings, self._show = plan.settings, show
        self._num_beams, self._num_groups = plan.num_beams, settings.num_beam_groups or 1
        self._penalty = 1.0 if settings.length_penalty is None else float(settings.length_penalty)
        self._noted: list[TraceStep] = []  # of this turn, one for each group
        self._raw: torch.Tensor | None = None  # (beams, vocab): this turn's log-probabilities before the processors
        self._parents: list[array[int]] = []  # of each step: the slot that each slot continues
        self._indices: list[array[int]] = []  # of each step: each slot's index among the live beams
        self._kept: dict[tuple[int, int, int], int] = {}  # the last step's (step, group, place): slots
        self._ended: dict[tuple[int, int, int], int] = {}  # (step, group, place): the slot that an ended one continues
        self._returned: list[Returned] = []
        self._progress: ConstraintProgress | None = None
        if plan.strategy == "constrained":
            constraints = prepare_constraints(settings, vocab_size=vocab_size, end_ids=plan.eos_token_ids)
            self._progress = ConstraintProgress(constraints, () if settings.strict_constraints else prompt, show)

    def see(self, report: TraceStep | Returned | Scored) -> None:
        """Take a step of one group, a sequence that is returned, or what the model says of every beam's next token."""
        if isinstance(report, TraceStep):
            self._noted.append(report)
        elif isinstance(report, Scored):
            self._raw = torch.log_softmax(report.logits, dim=-1)
        else:
            self._returned.append(report)

    def sum_up(self) -> list[dict[str, Any]]:
        """The event of the step just taken; none if the search has ended."""
        noted, self._noted = sorted(self._noted, key=lambda one: one.group), []
        raw, self._raw = self._raw, None
        if not noted:
            return []
        before = self._indices[-1] if self._indices else array("i", [NOT_LIVE] * self._num_beams)
        parents = array("i", [NOT_LIVE] * self._num_beams)
        indices = array("i", [NOT_LIVE] * self._num_beams)
        live: list[dict[str, Any]] = []
        ended: list[dict[str, Any]] = []
        size = self._num_beams // self._num_groups
        self._kept = {}
        for step in noted:
            for slot, place in enumerate(step.kept, start=step.group * size):
                one = step.candidates[place]
                if one.reason is not None or one.sum_logprobs == -math.inf:  # it goes on for want of others
                    continue
                parents[slot], indices[slot] = one.parent, len(live)
                self._kept[step.step, step.group, place] = slot
                live.append(self._describe(one, step, before, raw) | {"beam": slot, "progress": None})
            for place, score in step.finished.items():
                one = step.candidates[place]
                self._ended[step.step, step.group, place] = one.parent
                ended.append(self._describe(one, step, before, raw) | {"score": shorten(score)})
        self._parents.append(parents)
        self._indices.append(indices)
        if self._progress is not None:
            self._progress.follow(parents, {one["beam"]: one["id"] for one in live})
            for beam in live:
                beam["progress"] = self._progress.describe(beam["beam"])
        return [{"type": "beams", "step": len(self._indices) - 1, "live": live, "ended": ended}]

    def _describe(
        self, one: Candidate, step: TraceStep, before: array[int], raw: torch.Tensor | None
    ) -> dict[str, Any]:
        return {
            "parent": _find_index(before, one.parent),
            "group": step.group,
            "id": one.token,
            "text": self._show(one.token),
            "score": shorten(one.sum_logprobs / step.step**self._penalty),
            "sum_logprob": shorten(one.sum_logprobs),
            "raw_logprob": None if raw is None else shorten(float(raw[one.parent, one.token])),
        }

    def describe_returned(self, row: int) -> dict[str, Any]:
        """The score of a returned sequence, and its index among the live beams at each step (None where it ended)."""
        if not self._returned:
            return {"score": None, "beams": []}
        one = self._returned[row % len(self._returned)]  # if there are too few, they are returned again
        key = (one.step, one.group, one.place)
        path: list[int | None] = []
        if key in self._kept:
            slot = self._kept[key]
            last = one.step
        else:
            path.append(None)
            slot = self._ended.get(key, NOT_LIVE)
            last = one.step - 1
        for step in range(last - 1, -1, -1):
            if slot == NOT_LIVE:
                break
            path.append(_find_index(self._indices[step], slot))
            slot = self._parents[step][slot]
        return {"score": shorten(one.score), "beams": path[::-1]}


def _find_index(indices: array[int], slot: int) -> int | None:
    return None if indices[slot] == NOT_LIVE else indices[slot]


class ConstraintProgress:
    """How far each beam has come with the constraints."""

    def __init__(self, constraints: Sequence[Constraint], prompt: Sequence[int], show: Show) -> None:
        self._constraints = list(constraints)
        self._first = ConstraintListState(self._constraints)
        self._first.reset(prompt)
        self._states: dict[int, ConstraintListState] = {}
        self._phrases = [_spell(one, show) for one in self._constraints]

    def follow(self, parents: Sequence[int], tokens: dict[int, int]) -> None:
        """Let slots go on from their parents' progress with these tokens."""
        before, self._states = self._states, {}
        for slot, token in tokens.items():
            self._states[slot] = before.get(parents[slot], self._first).copy()
            self._states[slot].add(token)

    def describe(self, slot: int) -> list[dict[str, Any]]:
        """Each constraint's phrase, and how many of its tokens are written."""
        state = self._states[slot]
        begun = state.inprogress_constraint
        left = [*state.complete_constraints, *([] if begun is None else [begun]), *state.pending_constraints]
        entries = []
        for one, phrase in zip(self._constraints, self._phrases, strict=True):
            own = next(other for other in left if describe_constraint(other) == describe_constraint(one))
            left.remove(own)
            size = one.copy(stateful=False).remaining()
            entries.append({"phrase": phrase, "done": size - own.remaining(), "of": size})
        return entries


def _spell(constraint: Constraint, show: Show) -> str:
    phrases = list_phrases(constraint)
    if phrases is None:
        return describe_constraint(constraint)
    return " | ".join("".join(map(show, phrase)) for phrase in phrases[:_MOST_PHRASES])
