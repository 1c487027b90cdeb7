"""Beam search on a GPU, one step ahead: a step is launched before the host has looked at the last one's candidates.

The device decides which beams go on, by the rule that `PlainBeams` decides by: no row ends but by a token, and those
tokens are known there. The host repeats the decision from the candidates, one step late, and learns what is finished.
The step launched after the last one is forgotten. The decision is the end of the pass itself, if passes are captured
and the processors only forbid tokens, to all rows alike.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from unspool.decoding.beams.plain import PlainBeams
from unspool.decoding.beams.search import BeamTurns
from unspool.decoding.beams.selection import Listed, Selection, fetch_candidates, fits_kernels, select_beams
from unspool.decoding.beams.settings import NEVER, BeamSettings
from unspool.decoding.finish import Finish
from unspool.decoding.forbidden import ForbiddenMasks
from unspool.decoding.loop import Emitted
from unspool.decoding.rows import Rows
from unspool.decoding.scorer import Scorer
from unspool.errors import NoTokenLeftError
from unspool.kernels.beam_choice import BeamChoice, BeamSizes, ChosenBeams
from unspool.kernels.sending import send
from unspool.protocols import Want


@dataclass(frozen=True, slots=True)
class BeamFlight:
    """A step's candidates on their way to the host."""

    width: int  # of the history, these tokens included
    read: Callable[[], Listed]
    given: torch.Tensor | None  # what the processors were given; None if the pass did their work
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
        self._last: Selection | ChosenBeams | None = None  # the beams that go on; None: the host has them
        self._is_shared = False  # rows come and go between steps, as the host says
        self._unfollowed: Selection | ChosenBeams | None = None  # moves that the cache has not followed yet
        self._choice = self._make_choice()
        self._want = replace(scorer.reader.want, epilogue=self._choice)
        self._masks = ForbiddenMasks(scorer.reader.model.info.vocab_size)

    def _make_choice(self) -> BeamChoice | None:
        """What a pass chooses by at its end; None if candidates are drawn, or not from a pass's own logits."""
        settings = self._settings
        num_beams, num_candidates = settings.num_beams, settings.num_candidates
        is_fit = fits_kernels(self._rows.device, num_beams, num_candidates)
        if settings.do_sample or not self._scorer.can_choose or not is_fit:
            return None
        return BeamChoice(BeamSizes(num_beams, num_candidates, len(self._ends), NEVER), self._ends)

    def _set_choice(self) -> Want | None:
        """What the next pass is asked for, if it can choose."""
        choice, last = self._choice, self._last
        if choice is None or last is None or (forbidden := self._scorer.find_forbidden(self._rows)) is None:
            return None
        choice.before, choice.mask = last, self._masks.find(forbidden, self._rows.device)
        return self._want

    def turn(self) -> Emitted:
        """Launch the next step, then read the last one's candidates and see what has ended."""
        if not self._flights:
            if self._is_shared or not self._reader.can_follow:
                return self._turn_at_once()
            self._launch()
        flight = self._flights.popleft()
        if not self._finish.ends_at(flight.width):
            self._launch()
        listed = flight.read()
        self._plain.advance(listed, flight.width, lambda place: self._explain_no_token(flight, listed, place))
        return self._emit()

    def _launch(self) -> None:
        self._follow()
        scorer, rows = self._scorer, self._rows
        want = self._set_choice()
        history = rows.history() if scorer.processors and want is None else None
        chosen = self._select(want)
        rows.append_moved(chosen)
        self._unfollowed = chosen
        given = scorer.given if isinstance(chosen, Selection) else None
        self._flights.append(BeamFlight(max(rows.ends), fetch_candidates(chosen), given, history))

    def _select(self, want: Want | None) -> Selection | ChosenBeams:
        """Score every beam's next token, and decide on the device which go on."""
        scorer, last = self._scorer, self._last
        running = self._plain.list_running() if last is None else None
        drawing = self._plain.find_drawing()
        result = scorer.next_logits(self._rows, normalise=scorer.changes_logits, want=want)
        if isinstance(result.epilogue, ChosenBeams):
            self._last = result.epilogue
            return result.epilogue
        if last is not None:
            running = last.running
        assert running is not None
        self._last = selection = select_beams(
            result.scores,
            running,
            self._ends,
            self._settings,
            is_normalised=scorer.changes_logits,
            drawing=drawing,
        )
        return selection

    def _turn_at_once(self) -> Emitted:
        """A step whose moves the cache learns from the host."""
        self._follow()
        rows, num_rows = self._rows, len(self._rows)
        chosen = self._select(self._set_choice())
        listed = fetch_candidates(chosen)()
        parents = self._plain.advance(
            listed, max(rows.ends) + 1, lambda place: self._scorer.explain_no_token(rows, place)
        )
        rows.append_moved(chosen)
        self._reader.reorder_rows(parents)
        self._plain.follow()
        if len(rows) < num_rows:
            self._last = None
        return self._emit()

    def _follow(self) -> None:
        """Let the cache follow the last step's moves: only now, so that the step after it can be forgotten."""
        if self._unfollowed is not None:
            self._reader.follow_rows(self._unfollowed.parents)
            self._unfollowed = None

    def share(self) -> None:
        super().share()
        self._is_shared = True

    def settle(self) -> None:
        """Let the next step begin with what the host knows; shared beams have launched nothing ahead."""
        assert not self._flights
        self._follow()
        self._last = None

    def close(self) -> None:
        """Undo the step whose candidates nobody has read; without one, let the cache follow the last moves."""
        if not self._flights:
            self._follow()
            return
        num_flights = len(self._flights)
        self._flights.clear()
        self._unfollowed = self._last = None
        self._scorer.forget(num_flights)
        self._rows.drop(num_flights)

    def _explain_no_token(self, flight: BeamFlight, listed: Listed, place: int) -> NoTokenLeftError:
        """What left the row at `place` of a step without a token."""
        self.close()
        self._rows.drop(1)
        given = flight.given
        if given is None:  # the candidates are all that is left of the logits
            has_nan = any(map(math.isnan, listed[2][place // self._settings.num_beams]))
            shape = (len(self._rows), self._reader.model.info.vocab_size)
            others = 0.0 if self._scorer.processors else -math.inf  # they forbade all, or else the model
            given = torch.full(shape, math.nan if has_nan else others, device=self._rows.device)
        return self._scorer.blame(self._rows, given, place, flight.history)


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
