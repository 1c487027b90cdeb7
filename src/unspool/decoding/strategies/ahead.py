"""One token per row per turn on a GPU, one step ahead: a step is launched before the last one's tokens are looked at.

So the device never waits for the host. The tokens of a step feed the next one where they are; the host reads them from
pinned memory while that one runs. What it learns then comes one step late: a row that has ended rides along once more,
and the step launched after the last one is forgotten.

A step of a small model is shorter than what the host does for it. So if passes can choose tokens themselves, a few
steps are launched together, as far as they take two milliseconds, and their tokens are fetched together.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Final

import torch

from unspool.decoding.finish import Finish
from unspool.decoding.loop import Emitted
from unspool.decoding.record import PendingLogprobs, fetch_logprobs
from unspool.decoding.rows import Rows
from unspool.decoding.scorer import Scorer
from unspool.decoding.select import NO_TOKEN
from unspool.decoding.strategies.base import Strategy
from unspool.decoding.strategies.sample import Sample
from unspool.decoding.strategies.turns import TokenTurns
from unspool.kernels.sending import Fetched, FetchedOnce, fetch, fetch_once

SECONDS_AT_ONCE: Final = 2e-3  # of steps that are launched together: those after a text's end are done for nothing
MOST_STEPS: Final = 8


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step's tokens on their way to the host, beside those of steps that were launched with it."""

    numbers: list[int]  # the rows of the call that the step was launched for
    width: int  # of the history, these tokens included
    tokens: Fetched | FetchedOnce  # (rows,) int64, or (steps, rows)
    place: int = 0  # of the step among them
    logprobs: PendingLogprobs | None = None  # of its tokens, if they are wanted

    def land(self) -> list[int]:
        """The tokens, once they are there."""
        if isinstance(self.tokens, FetchedOnce):
            return self.tokens.read_list()
        landed = self.tokens.read()
        tokens: list[int] = (landed if landed.dim() == 1 else landed[self.place]).tolist()
        return tokens


@dataclass(slots=True)
class Pace:
    """How long a step takes, and how many are launched together therefore."""

    seconds: float = SECONDS_AT_ONCE
    landed_at: float | None = None  # when the tokens of the last steps came

    def note(self, num_steps: int) -> None:
        """Note that the tokens of so many more steps have come."""
        now = time.perf_counter()
        if self.landed_at is not None:
            self.seconds = (now - self.landed_at) / num_steps
        self.landed_at = now

    @property
    def num_steps(self) -> int:
        """How many steps to launch together."""
        return max(1, min(MOST_STEPS, int(SECONDS_AT_ONCE / max(self.seconds, 1e-6))))


@dataclass(slots=True)
class AheadTurns(TokenTurns):
    """`TokenTurns` whose next steps are launched before the last ones' tokens are read."""

    flights: deque[LaunchedStep] = field(default_factory=deque)
    is_first: bool = True
    pace: Pace = field(default_factory=Pace)
    num_together: int = 1  # steps that were launched together last, and have not landed

    def turn(self) -> Emitted:
        """Launch the next steps, then read what the last one chose and see who is done."""
        if not self.flights:
            self._launch()
        flight = self.flights.popleft()
        if flight.place == 0:
            num_landing = self.num_together
            if not self.is_first and not self.finish.ends_at(max(self.rows.ends)):
                self._launch()
            self.is_first = False  # the first token is emitted before the step that follows it is captured
            new_tokens = flight.land()
            self.pace.note(num_landing)
        else:
            new_tokens = flight.land()
        if NO_TOKEN in new_tokens:
            self._raise_no_token(flight, new_tokens)
        emitted = Emitted({}, {})
        if flight.logprobs is not None:
            found = zip(flight.numbers, flight.logprobs.read(), strict=True)
            emitted.logprobs = {number: [one] for number, one in found if number not in self.reasons}
        reasons = self._explain(flight, new_tokens)
        for number, token, reason in zip(flight.numbers, new_tokens, reasons, strict=True):
            if number in self.reasons:
                continue  # it ended while this step was under way
            emitted.tokens[number] = [token]
            if reason is not None:
                emitted.finished[number] = self.reasons[number] = reason
        if self.rows_may_leave and emitted.finished:
            self._let_leave()
        return emitted

    def _explain(self, flight: LaunchedStep, new_tokens: list[int]) -> list[str | None]:
        """Why rows are done with a step; of those that have ended before it nothing is said."""
        numbers = flight.numbers
        if not self.reasons or not self.finish.needs_history:
            return self.finish.explain_tokens(new_tokens, flight.width, numbers)
        going = [place for place, number in enumerate(numbers) if number not in self.reasons]
        tokens, left = [new_tokens[place] for place in going], [numbers[place] for place in going]
        found = dict(zip(going, self.finish.explain_tokens(tokens, flight.width, left), strict=True))
        return [found.get(place) for place in range(len(numbers))]

    def _launch(self) -> None:
        rows, numbers, together = self.rows, list(self.rows.numbers), self._launch_together()
        fetched: Fetched | FetchedOnce
        if together is not None:
            first, fetched = max(rows.ends) + 1, fetch(together)
            rows.append_steps(together)
            self.flights += [LaunchedStep(numbers, first + place, fetched, place) for place in range(len(together))]
            self.num_together = len(together)
            return
        choice = self.strategy.step(rows)
        chosen, num_top = choice.tokens, self.record.num_top  # (rows, 1)
        logprobs = None if num_top is None else fetch_logprobs(choice.logits, chosen[:, 0], num_top)
        rows.append(chosen)
        if rows.expects_last:
            kept = fetched = fetch(chosen[:, 0])
            rows.expect_last(kept)
        else:
            fetched = fetch_once(chosen[:, 0])
        self.flights.append(LaunchedStep(numbers, max(rows.ends), fetched, logprobs=logprobs))
        self.num_together = 1

    def _launch_together(self) -> torch.Tensor | None:
        """What the next steps choose (steps, rows), as many as their time allows; None if one is taken alone."""
        left = self.finish.count_left(max(self.rows.ends))
        if not left or not isinstance(self.strategy, Sample):
            return None
        return self.strategy.launch(self.rows, min(self.pace.num_steps, left))

    def settle(self) -> None:
        """Undo the steps whose tokens nobody has read: they are launched again, with the rows that are there then."""
        self.close()
        self.is_first = True  # the next turn launches one step alone

    def close(self) -> None:
        """Undo the steps whose tokens nobody has read."""
        num_flights = len(self.flights)
        self.flights.clear()
        self.record.forget(num_flights)
        if num_flights and self.rows.numbers:
            self.strategy.forget(num_flights)
            self.rows.drop(num_flights)

    def _raise_no_token(self, flight: LaunchedStep, new_tokens: list[int]) -> None:
        """Take the step again, with nothing launched after it, so that what left no token can be found."""
        places = [place for place, number in enumerate(flight.numbers) if number not in self.reasons]
        row = next((flight.numbers[place] for place in places if new_tokens[place] == NO_TOKEN), None)
        if row is None:
            return  # only rows that have ended
        self.close()
        self.strategy.retake(self.rows)
        raise self.strategy.explain_no_token(self.rows, self.rows.numbers.index(row))


def can_run_ahead(scorer: Scorer, strategy: Strategy, rows: Rows, finish: Finish, *, rows_may_leave: bool) -> bool:
    """Whether nothing that a step needs is decided on the host, and nothing that it leaves must be undone there."""
    record = scorer.record
    keeps_too_much = record.is_seen or (record.keeps_steps and len(rows) > 1)  # rows would ride along
    return (
        rows.device.type == "cuda"
        and not finish.needs_device
        and not keeps_too_much
        and not scorer.has_custom_processors
        and (rows_may_leave or len(rows) == 1)
        and strategy.can_forget
    )
