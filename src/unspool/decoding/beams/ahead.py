"""Beam search on a GPU, one step ahead: a step is launched before the host has looked at the last one's candidates.

The device decides which beams go on, by the rule that `PlainBeams` decides by: no row ends but by a token, and those
tokens are known there. The host repeats the decision from the candidates, one step late, and learns what is finished.
The step launched after the last one is forgotten.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch

from unspool.decoding.beams.plain import PlainBeams
from unspool.decoding.beams.search import BeamTurns
from unspool.decoding.beams.selection import Selection, fetch_candidates, read_candidates, select_beams
from unspool.decoding.beams.settings import BeamSettings
from unspool.decoding.finish import Finish
from unspool.decoding.loop import Emitted
from unspool.decoding.rows import Rows
from unspool.decoding.scorer import Scorer
from unspool.errors import NoTokenLeftError
from unspool.kernels.sending import FetchedOnce, send


@dataclass(frozen=True, slots=True)
class BeamFlight:
    """A step's candidates on their way to the host."""

    width: int  # of the history, these tokens included
    candidates: FetchedOnce
    given: torch.Tensor | None  # what the processors were given
    history: torch.Tensor | None  # and what they saw


class AheadBeamTurns(BeamTurns):
    """`BeamTurns` of a plain search whose next step is launched before this one's candidates are read.

    If the cache can't follow an index on the device, which it can under captured steps over keys that lie row by row,
    the host reads each step's candidates before the next one; the choice is made on the device all the same.
    """

    def __init__(
        self,
        beams: PlainBeams,
        scorer: Scorer,
        rows: Rows,
        finish: Finish,
        settings: BeamSettings,
        *,
        num_prompts: int,
        shows_table: bool,
    ) -> None:
        super().__init__(beams, scorer, rows, num_prompts, settings.num_returned, shows_table=shows_table)
        self._plain, self._scorer, self._finish, self._settings = beams, scorer, finish, settings
        self._ends = send(finish.end_tokens, rows.device)
        self._flights: deque[BeamFlight] = deque()
        self._running: torch.Tensor | None = None  # (rows,): log-probabilities of the beams; None: the host has them
        self._parents: torch.Tensor | None = None  # (rows,): the moves that the cache has not followed yet

    def turn(self) -> Emitted:
        """Launch the next step, then read the last one's candidates and see what has ended."""
        if not self._flights:
            if not self._reader.can_follow:
                return self._turn_at_once()
            self._launch()
        flight = self._flights.popleft()
        if not self._finish.ends_at(flight.width):
            self._launch()
        listed = flight.candidates.read(read_candidates)
        self._plain.advance(listed, flight.width, lambda place: self._explain_no_token(flight, place))
        return self._emit()

    def _launch(self) -> None:
        self._follow()
        scorer, rows = self._scorer, self._rows
        history = rows.history() if scorer.processors else None
        selection = self._select()
        rows.append_moved(selection.tokens, selection.parents)
        self._parents = selection.parents
        self._flights.append(BeamFlight(max(rows.ends), fetch_candidates(selection), scorer.given, history))

    def _select(self) -> Selection:
        """Score every beam's next token, and decide on the device which go on."""
        scorer = self._scorer
        running = self._plain.list_running() if self._running is None else self._running
        drawing = self._plain.find_drawing()
        result = scorer.next_logits(self._rows, normalise=scorer.changes_logits)
        selection = select_beams(
            result.scores,
            running,
            self._ends,
            self._settings,
            is_normalised=scorer.changes_logits,
            drawing=drawing,
        )
        self._running = selection.running
        return selection

    def _turn_at_once(self) -> Emitted:
        """A step whose moves the cache learns from the host."""
        self._follow()
        rows, num_rows = self._rows, len(self._rows)
        selection = self._select()
        listed = fetch_candidates(selection).read(read_candidates)
        parents = self._plain.advance(
            listed, max(rows.ends) + 1, lambda place: self._scorer.explain_no_token(rows, place)
        )
        rows.append_moved(selection.tokens, selection.parents)
        self._reader.reorder_rows(parents)
        self._plain.follow()
        if len(rows) < num_rows:
            self._running = None
        return self._emit()

    def _follow(self) -> None:
        """Let the cache follow the last step's moves: only now, so that the step after it can be forgotten."""
        if self._parents is not None:
            self._reader.follow_rows(self._parents)
            self._parents = None

    def close(self) -> None:
        """Undo the step whose candidates nobody has read; without one, let the cache follow the last moves."""
        if not self._flights:
            self._follow()
            return
        num_flights = len(self._flights)
        self._flights.clear()
        self._parents = self._running = None
        self._scorer.forget(num_flights)
        self._rows.drop(num_flights)

    def _explain_no_token(self, flight: BeamFlight, place: int) -> NoTokenLeftError:
        """What left the row at `place` of a step without a token."""
        self.close()
        self._rows.drop(1)
        assert flight.given is not None
        return self._scorer.blame(self._rows, flight.given, place, flight.history)


def can_search_ahead(scorer: Scorer, rows: Rows, finish: Finish, *, rows_may_leave: bool, num_prompts: int) -> bool:
    """Whether nothing that a step needs is decided on the host, and what it leaves of ended searches is nobody's."""
    return (
        rows.device.type == "cuda"
        and not finish.needs_history
        and not scorer.record.keeps_any
        and not scorer.has_custom_processors
        and not scorer.reads_host
        and (rows_may_leave or num_prompts == 1)
    )
