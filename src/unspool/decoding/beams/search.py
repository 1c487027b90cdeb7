"""Beam search: several continuations of every prompt go on together, and the best are returned.

One search for all beam methods: `BeamTurns` moves rows, cache and what is emitted. What differs between the methods is
which continuations go on and which have ended; that is a `Beams`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import accumulate
from typing import Protocol

from unspool.cache import Cache
from unspool.decoding.beams.agreement import Agreement
from unspool.decoding.beams.moves import MovedTokens, Moves
from unspool.decoding.beams.plain import PlainBeams
from unspool.decoding.beams.reports import BeamReports
from unspool.decoding.finish import JoinedFinish
from unspool.decoding.loop import Emitted, LiveBeam, Result
from unspool.decoding.reader import Reader
from unspool.decoding.rows import Joining, Rows
from unspool.decoding.scorer import Scorer


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
        self._beams, self._rows, self._scorer, self._reader = beams, rows, scorer, scorer.reader
        self._num_returned = num_returned
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
        beams, agreement = self._beams, self._agreement
        emitted, found = Emitted({}, {}), agreement.open
        for prompt in found:
            agreement.add(emitted, prompt, beams.list_live(prompt), beams.list_returned(prompt))
        if emitted.finished and isinstance(beams, PlainBeams):
            beams.forget(set(found).difference(agreement.open))
        if beams.reports is not None:
            emitted.logprobs = {row: beams.reports.take(row, tokens) for row, tokens in emitted.tokens.items()}
        if self._shows_table:
            table = [beams.list_table(prompt) for prompt in range(self._num_prompts)]
            emitted.beams = table if any(table) else None
        return emitted

    # --- prompts of several runs -------------------------------------------------------------------------
    @property
    def reader(self) -> Reader:
        """What reads the rows."""
        return self._reader

    def share(self) -> None:
        """Prompts of other runs may come from now on; what has ended leaves."""
        self._find_plain().share()

    def settle(self) -> None:
        """Leave nothing half done: rows are about to come or to go."""

    def admit(self, others: Sequence[BeamTurns], cache: Cache) -> list[int]:
        """Take in the beams of other turns at work, after these; `cache` holds the keys of all. The others are used up.

        Returns the number that sequence 0 of each has among these.
        """
        sets = [self, *others]
        for one in sets:
            one.share()
            one.settle()
        beams = [one._find_plain() for one in sets]
        numbers = [list(one._rows.numbers) for one in sets]
        firsts = list(accumulate([one._num_prompts for one in sets], initial=0))
        self._num_prompts = firsts.pop()
        first_rows = [first * beams[0].num_beams for first in firsts]
        shifts = self._rows.admit([one._rows for one in others], first_rows[1:])
        joining = Joining([len(own) for own in numbers], first_rows, shifts)
        self._scorer.admit([one._scorer for one in others], cache, joining)
        finish = JoinedFinish.of([one.finish for one in beams], numbers, joining)
        beams[0].admit(beams[1:], firsts[1:], finish)
        self._agreement.admit([one._agreement for one in others], firsts[1:])
        return [first * self._num_returned for first in firsts[1:]]

    def find_places(self, numbers: Collection[int]) -> list[int]:
        """The rows of the cache that sequences of these numbers are searched in."""
        prompts, num_beams = {number // self._num_returned for number in numbers}, self._find_plain().num_beams
        return [place for place, number in enumerate(self._rows.numbers) if number // num_beams in prompts]

    def drop(self, numbers: Collection[int]) -> None:
        """Let the prompts of sequences go before their searches have ended; not all that there are."""
        self.settle()
        prompts = {number // self._num_returned for number in numbers}
        self._agreement.forget(prompts)
        self._find_plain().drop(prompts)

    def _find_plain(self) -> PlainBeams:
        if not isinstance(self._beams, PlainBeams):
            raise ValueError("beams in groups or with constraints are stepped by their own call")
        return self._beams

    def result(self) -> Result:
        """The scores and origins of the sequences returned, and the trace."""
        return self._beams.result()

    def close(self) -> None:
        """Nothing is left undone."""
