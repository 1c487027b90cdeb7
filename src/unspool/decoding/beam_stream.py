"""What a beam search shows while it runs: the tokens that are certain, the table of beams, and the trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from unspool.decoding.loop import Emitted


@dataclass(frozen=True, slots=True)
class Candidate:
    """A continuation that a step looked at."""

    token: int
    parent: int  # the beam it continues, within its prompt
    sum_logprobs: float
    reason: str | None  # why its sequence would end here; None where it goes on


class Agreement:
    """Tells the tokens that every live beam of a prompt agrees on, once; nothing told is ever taken back.

    What can still be returned is a running beam's descendant or a finished hypothesis that is kept, so the tokens
    that all of these share are certain.
    """

    def __init__(self, num_prompts: int, num_returned: int, *, shows_table: bool = False) -> None:
        self._num_returned = num_returned
        self._told = [0] * num_prompts
        self._is_over = [False] * num_prompts
        self.shows_table = shows_table

    def tell(
        self,
        emitted: Emitted,
        prompt: int,
        live: Sequence[Sequence[int]],
        ended: Sequence[tuple[list[int], str]] | None,
    ) -> None:
        """Add what became certain of a prompt; with `ended`, the rest of each sequence that is returned."""
        if self._is_over[prompt]:
            return
        told, first_row = self._told[prompt], prompt * self._num_returned
        if ended is not None:
            self._is_over[prompt] = True
            for place, (tokens, reason) in enumerate(ended):
                emitted.tokens[first_row + place] = list(tokens[told:])
                emitted.finished[first_row + place] = reason
            return
        sure = _count_shared(live, told)
        if sure > told:
            for place in range(self._num_returned):
                emitted.tokens[first_row + place] = list(live[0][told:sure])
            self._told[prompt] = sure


def _count_shared(sequences: Sequence[Sequence[int]], start: int) -> int:
    """The length of the prefix that all sequences share, which is at least `start`."""
    shortest = min(len(sequence) for sequence in sequences)
    for place in range(start, shortest):
        token = sequences[0][place]
        if any(sequence[place] != token for sequence in sequences):
            return place
    return max(start, shortest)


@dataclass(slots=True)
class TraceStep:
    """One prompt's candidates at one step, best first, and which of them went on."""

    prompt: int
    step: int
    candidates: list[Candidate]
    kept: list[int]  # places of the candidates that became the next beams, in their order


@dataclass(slots=True)
class BeamTrace:
    """Every step's candidates: token, log-probability, parent, kept or dropped, finished."""

    num_beams: int
    steps: list[TraceStep] = field(default_factory=list)

    def note(self, prompt: int, step: int, candidates: list[Candidate], kept: list[int]) -> None:
        """Add a step of one prompt."""
        self.steps.append(TraceStep(prompt, step, candidates, kept))

    def to_dict(self) -> dict[str, Any]:
        """The trace as plain values, for JSON."""
        return asdict(self)
