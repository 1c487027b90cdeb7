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
from unspool.decoding.strategies.sample import Sample
from unspool.decoding.strategies.turns import TokenTurns

SECONDS_AT_ONCE: Final = 0.02  # that one call may take: a stream stays smooth, and a call can be stopped
MOST_STEPS: Final = 64


@dataclass(slots=True)
class StretchTurns(TokenTurns):
    """`TokenTurns` of a greedy search or of sampling whose steps are taken several at a time."""

    scorer: Scorer | None = None
    most_steps: int = MOST_STEPS  # of one call
    ready: deque[list[int]] = field(default_factory=deque)  # what steps that were taken chose, one per row
    seconds: float = SECONDS_AT_ONCE  # of a step, as last measured

    def turn(self) -> Emitted:
        """Tell of the next step, taken already or now."""
        assert self.scorer is not None
        if not self.ready:
            self._take()
        if not self.ready:
            return TokenTurns.turn(self)
        chosen = self.ready.popleft()
        self.scorer.reader.accept_step(self.rows)
        self.rows.append_late(chosen)
        emitted = self._tell([[token] for token in chosen], Emitted({}, {}))
        if emitted.finished:  # what follows was chosen before that was known
            self.ready.clear()
        return emitted

    def _take(self) -> None:
        """Take as many steps as time allows, unless the first is still to be answered, or a row goes on as padding."""
        assert self.scorer is not None
        reader, rows = self.scorer.reader, self.rows
        if reader.is_fresh or any(number in self.reasons for number in rows.numbers):
            return
        num_steps = min(self.most_steps, max(1, int(SECONDS_AT_ONCE / self.seconds)))
        left = self.finish.count_left(max(rows.ends))
        started = time.perf_counter()
        num_steps = num_steps if left is None else min(num_steps, left)
        choose = cast(Sample, self.strategy).start_choosing(rows, num_steps)
        taken = reader.stretch(rows, num_steps, self.finish.end_tokens, choose)
        if taken:
            self.seconds = (time.perf_counter() - started) / len(taken)
            self.ready.extend(taken)


def can_stretch(scorer: Scorer, rows: Rows) -> bool:
    """Whether the model takes steps several at a time, and nothing in the call has to see what lies between them."""
    return rows.device.type == "cpu" and scorer.can_choose and scorer.reader.can_stretch
