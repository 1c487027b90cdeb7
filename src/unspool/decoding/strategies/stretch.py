"""Steps several at a time: on a CPU what lies between two calls of a model costs as much as a tenth of a step.

The model takes the steps, and the turns emit them one by one: rows, cache and counts are at every turn what single
steps make them. What was taken and is not emitted, because something ended a row first, is forgotten: its keys lie past
the row's end, where the next step overwrites them.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Final, cast

from unspool.decoding.loop import Emitted
from unspool.decoding.rows import Rows
from unspool.decoding.scorer import Scorer
from unspool.decoding.strategies.choosing import ChosenSteps
from unspool.decoding.strategies.sample import Sample
from unspool.decoding.strategies.turns import TokenTurns
from unspool.decoding.stretching import accept_step, take_steps, takes_stretches

SECONDS_AT_ONCE: Final = 0.02  # that one call may take: a stream stays smooth, and a call can be stopped
MOST_STEPS: Final = 64


@dataclass(slots=True)
class Choosing:
    """What chooses the tokens of stretch after stretch, while nothing else happens to the rows: it knows their text."""

    steps: ChosenSteps
    lengths: list[int]  # of the rows, where it has come to
    num_left: int  # steps that it can choose

    def fits(self, lengths: list[int]) -> bool:
        """Whether it can go on after rows of these lengths."""
        return self.num_left > 0 and self.lengths == lengths

    def advance(self, num_steps: int) -> None:
        """Note steps that it has chosen."""
        self.lengths = [length + num_steps for length in self.lengths]
        self.num_left -= num_steps


@dataclass(slots=True)
class StretchTurns(TokenTurns):
    """`TokenTurns` of a greedy search or of sampling whose steps are taken several at a time."""

    scorer: Scorer | None = None
    most_steps: int = MOST_STEPS  # of one call
    ready: deque[list[int]] = field(default_factory=deque)  # what steps that were taken chose, one per row
    seconds: float = SECONDS_AT_ONCE  # of a step, as last measured
    choosing: Choosing | None = None
    path: str = ""  # how the steps that are ready were run

    def turn(self) -> Emitted:
        """Enter the next step, taken already or now."""
        assert self.scorer is not None
        if not self.ready:
            self._take()
        if not self.ready:
            self.choosing = None
            return TokenTurns.turn(self)
        chosen = self.ready.popleft()
        accept_step(self.scorer.reader, self.rows, self.path)
        self.rows.append_late(chosen)
        emitted = self._enter([[token] for token in chosen], Emitted({}, {}))
        if emitted.finished:  # what follows was chosen before that was known
            self.ready.clear()
            self.choosing = None
        return emitted

    def _take(self) -> None:
        """Take as many steps as time allows, unless the first is still to be answered, or a row goes on as padding."""
        assert self.scorer is not None
        reader, rows = self.scorer.reader, self.rows
        if reader.is_fresh or any(number in self.reasons for number in rows.numbers):
            return
        num_steps = min(self.most_steps, max(1, int(SECONDS_AT_ONCE / self.seconds)))
        left = self.finish.count_left(max(rows.ends))
        most = MOST_STEPS if left is None else min(MOST_STEPS, left)
        started = time.perf_counter()
        choosing = self.choosing
        if choosing is None or not choosing.fits(list(rows.lengths)):
            steps = cast(Sample, self.strategy).start_choosing(rows, most)
            choosing = Choosing(steps, list(rows.lengths), steps.num_steps)
        num_steps, steps = min(num_steps, choosing.num_left), choosing.steps
        stretch = take_steps(reader, rows, num_steps, self.finish.end_tokens, steps.choose, steps.forbidden)
        taken = [] if stretch is None else stretch.steps
        # After fewer steps than were asked for it may have seen more than what was taken.
        self.choosing = choosing if len(taken) == num_steps else None
        if stretch is not None and taken:
            choosing.advance(len(taken))
            self.seconds = (time.perf_counter() - started) / len(taken)
            self.ready.extend(taken)
            self.path = stretch.path


def can_stretch(scorer: Scorer, rows: Rows) -> bool:
    """Whether the model takes steps several at a time, and nothing in the call has to see what lies between them."""
    if scorer.processors.remembers_steps:  # of steps behind the end of a row, too, which can't be taken back
        return False
    return rows.device.type == "cpu" and scorer.can_choose and takes_stretches(scorer.reader)
