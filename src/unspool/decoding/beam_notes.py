"""A beam scorer's verdicts, written into the trace: exactly what went on, what ended, and what came back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from unspool.beams.hypotheses import Hypothesis
from unspool.decoding.beam_trace import BeamTrace, Candidate


class VerdictNotes:
    """Compares a scorer before and after it decided, and writes down what that says."""

    def __init__(self, trace: BeamTrace, scorer: Any, end_ids: Sequence[int]) -> None:
        self._trace, self._scorer, self._end_ids = trace, scorer, frozenset(end_ids)
        self._size = trace.num_beams // trace.num_groups
        self._was_done: list[bool] = []
        self._known: list[list[Hypothesis]] = []
        self._ends: list[tuple[Hypothesis, int, int]] = []  # finished ones; the step and place of their last token

    def look(self) -> None:
        """Remember how things stand, before the scorer decides."""
        self._was_done = self._scorer._done.tolist()
        self._known = [list(pool.beams) for pool in self._scorer._beam_hyps]

    def note(
        self,
        step: int,
        group: int,
        history: torch.Tensor,
        offered: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        verdict: Mapping[str, torch.Tensor],
    ) -> None:
        """Write down a group's step: what was offered (log-probability, token, beam), and the verdict on it.

        `history` (prompts * group's beams, length) and the beams offered are those of this group.
        """
        size = self._size
        decided = [verdict[f"next_beam_{name}"].tolist() for name in ("scores", "tokens", "indices")]
        for prompt, columns in enumerate(zip(*(part.tolist() for part in offered), strict=True)):
            if self._was_done[prompt * self._trace.num_groups + group]:
                continue  # what such a row goes on with is padding
            candidates = [self._read(group, *values) for values in zip(*columns, strict=True)]
            places = {(one.parent, one.token): place for place, one in enumerate(candidates)}
            finished = self._find_finished(prompt, group, step, candidates, history)
            kept = []
            own = slice(prompt * size, (prompt + 1) * size)
            for score, token, beam in zip(*(part[own] for part in decided), strict=True):
                chosen = self._read(group, score, token, beam - prompt * size)
                if (chosen.parent, token) not in places:  # put forward by a constraint, not by its probability
                    places[chosen.parent, token] = len(candidates)
                    candidates.append(chosen)
                kept.append(places[chosen.parent, token])
            self._trace.note(prompt, step, candidates, kept, group=group, finished=finished)

    def note_returned(self, prompt: int, group: int, hypothesis: Hypothesis, beam: int | None, reason: str) -> None:
        """Write down a sequence that is returned: one that was finished before, or a running `beam` of the group."""
        if beam is None:
            step, place = next((step, place) for known, step, place in self._ends if known is hypothesis)
        else:
            own = (one for one in reversed(self._trace.steps) if (one.prompt, one.group) == (prompt, group))
            last = next(own)
            step, place = last.step, last.kept[beam]
        self._trace.note_returned(prompt, step, place, hypothesis.score, reason, group=group)

    def _read(self, group: int, score: float, token: int, beam: int) -> Candidate:
        return Candidate(token, group * self._size + beam, score, "eos" if token in self._end_ids else None)

    def _find_finished(
        self, prompt: int, group: int, step: int, candidates: Sequence[Candidate], history: torch.Tensor
    ) -> dict[int, float]:
        """The candidates that the scorer has put among the finished ones, with their scores."""
        pool_place = prompt * self._trace.num_groups + group
        pool = self._scorer._beam_hyps[pool_place]
        first_row, first_beam = prompt * self._size, group * self._size
        finished: dict[int, float] = {}
        for hypothesis in pool.beams:
            if any(hypothesis is known for known in self._known[pool_place]):
                continue
            for place, one in enumerate(candidates[: self._size]):
                if (
                    one.reason is not None
                    and place not in finished
                    and pool._score(one.sum_logprobs, step) == hypothesis.score
                    and torch.equal(history[first_row + one.parent - first_beam], hypothesis.tokens)
                ):
                    finished[place] = hypothesis.score
                    self._ends.append((hypothesis, step, place))
                    break
        return finished
