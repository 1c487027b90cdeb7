"""A beam scorer's verdicts, written into the trace: exactly what went on, what ended, and what came back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from unspool.beams.hypotheses import Ending
from unspool.beams.scorer import HypothesisScorer
from unspool.decoding.beams.trace import BeamTrace, Candidate


class VerdictNotes:
    """Writes down what a beam scorer was offered and what it decided."""

    def __init__(
        self, trace: BeamTrace, judge: HypothesisScorer, end_ids: Sequence[int], explain_end: Callable[[int], str]
    ) -> None:
        self._trace, self._judge, self._end_ids = trace, judge, frozenset(end_ids)
        self._explain_end = explain_end  # by the number of new tokens, of which an end token is the last
        self._size = trace.num_beams // trace.num_groups
        self._was_done: list[bool] = []

    def look(self, group: int) -> None:
        """Remember which prompts are done already, before the scorer decides."""
        self._was_done = [self._judge.is_over(prompt, group) for prompt in range(self._judge.batch_size)]

    def note(
        self,
        step: int,
        group: int,
        offered: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        verdict: Mapping[str, torch.Tensor],
    ) -> None:
        """Write down a group's step: what was offered (log-probability, token, beam of the group), and the verdict."""
        size = self._size
        decided = [verdict[f"next_beam_{name}"].tolist() for name in ("scores", "tokens", "indices")]
        for prompt, columns in enumerate(zip(*(part.tolist() for part in offered), strict=True)):
            if self._was_done[prompt]:
                continue  # what such a row goes on with is padding
            candidates = [self._read(step, group, *values) for values in zip(*columns, strict=True)]
            places = {(one.parent, one.token): place for place, one in enumerate(candidates)}
            endings = self._judge.list_endings(prompt, group)
            finished = {
                one.place: one.hypothesis.score for one in endings if one.place is not None and one.step == step
            }
            kept = []
            own = slice(prompt * size, (prompt + 1) * size)
            for score, token, beam in zip(*(part[own] for part in decided), strict=True):
                chosen = self._read(step, group, score, token, beam - prompt * size)
                if (chosen.parent, token) not in places:  # put forward by a constraint, not by its probability
                    places[chosen.parent, token] = len(candidates)
                    candidates.append(chosen)
                kept.append(places[chosen.parent, token])
            self._trace.note(prompt, step, candidates, kept, group=group, finished=finished)

    def note_returned(self, prompt: int, group: int, ending: Ending, reason: str) -> None:
        """Write down a sequence that is returned."""
        step, place = ending.step, ending.place
        if place is None:  # it was running to the last
            assert ending.beam is not None
            last = next(one for one in reversed(self._trace.steps) if (one.prompt, one.group) == (prompt, group))
            step, place = last.step, last.kept[ending.beam]
        self._trace.note_returned(prompt, step, place, ending.hypothesis.score, reason, group=group)

    def _read(self, step: int, group: int, score: float, token: int, beam: int) -> Candidate:
        reason = self._explain_end(step) if token in self._end_ids else None
        return Candidate(token, group * self._size + beam, score, reason)
