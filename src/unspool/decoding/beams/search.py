"""Beam search: several continuations of every prompt go on together, and the best are returned.

One search for all beam methods: `BeamTurns` moves rows, cache and what is emitted. What differs between the methods is
which continuations go on and which have ended; that is a `Beams`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from unspool.decoding.beams.agreement import Agreement
from unspool.decoding.beams.reports import BeamReports
from unspool.decoding.loop import Emitted, LiveBeam, Result
from unspool.decoding.rows import Rows
from unspool.decoding.scorer import Scorer


class Moves(NamedTuple):
    """What rows go on with."""

    parents: list[int]  # the row that each goes on from
    tokens: torch.Tensor  # (rows,): its next token
    sources: torch.Tensor | None = None  # (rows,): the parents where the rows are, if they are known there


class MovedTokens(NamedTuple):
    """What rows go on with, where they are."""

    parents: torch.Tensor  # (rows,)
    column: torch.Tensor  # (rows, 1)


class Beams(Protocol):
    """The beams of every prompt: which go on, which have ended, and which are returned."""

    reports: BeamReports | None
    """Log-probabilities of what may be returned, if they are asked for."""

    def is_done(self) -> bool:
        """Whether every prompt's search has ended."""
        ...

    def choose(self) -> Moves:
        """What every row goes on with."""
        ...

    def follow(self) -> None:
        """Called once the rows have moved and got their tokens: see what has ended."""
        ...

    def list_live(self, prompt: int) -> Sequence[Sequence[int]]:
        """New tokens of everything that can still be returned, or go on to be, of a prompt."""
        ...

    def list_returned(self, prompt: int) -> list[tuple[list[int], str]] | None:
        """New tokens of what is returned of a prompt and why each ended, best first; None while its search goes on."""
        ...

    def list_table(self, prompt: int) -> list[LiveBeam]:
        """A prompt's beams as they stand, for whoever watches the search; empty once there are none."""
        ...

    def result(self) -> Result:
        """What is added to the output."""
        ...


class BeamTurns:
    """A beam search at work: in every turn all beams' next tokens are scored, and rows follow those that go on."""

    reads_choice = False

    def __init__(
        self, beams: Beams, scorer: Scorer, rows: Rows, num_prompts: int, num_returned: int, *, shows_table: bool
    ) -> None:
        self._beams, self._rows, self._reader = beams, rows, scorer.reader
        self._agreement = Agreement(num_prompts, num_returned)
        self._num_prompts, self._shows_table = num_prompts, shows_table

    def is_done(self) -> bool:
        """Whether every prompt's search has ended."""
        return self._beams.is_done()

    def turn(self) -> Emitted:
        """Choose every beam's next token, let the rows follow, and return what became certain."""
        beams, rows = self._beams, self._rows
        parents, tokens, sources = beams.choose()
        if sources is not None:
            rows.append_moved(MovedTokens(sources, tokens[:, None]))
        else:
            if parents != list(range(len(rows))):
                rows.reorder(parents)
            rows.append(tokens[:, None])
        self._reader.reorder_rows(parents)
        beams.follow()
        return self._emit()

    def _emit(self) -> Emitted:
        """What the last step made certain."""
        beams = self._beams
        emitted = Emitted({}, {})
        for prompt in range(self._num_prompts):
            self._agreement.add(emitted, prompt, beams.list_live(prompt), beams.list_returned(prompt))
        if beams.reports is not None:
            emitted.logprobs = {row: beams.reports.take(row, tokens) for row, tokens in emitted.tokens.items()}
        if self._shows_table:
            table = [beams.list_table(prompt) for prompt in range(self._num_prompts)]
            emitted.beams = table if any(table) else None
        return emitted

    def result(self) -> Result:
        """The scores and origins of the sequences returned, and the trace."""
        return self._beams.result()

    def close(self) -> None:
        """Nothing is left undone."""
