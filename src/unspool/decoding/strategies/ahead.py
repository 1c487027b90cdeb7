"""One token per row per turn on a GPU, one step ahead: a step is launched before the last one's tokens are looked at.

So the device never waits for the host. The tokens of a step feed the next one where they are; the host reads them from
pinned memory while that one runs. What it learns then comes one step late: a row that has ended rides along once more,
and the step launched after the last one is forgotten.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch

from unspool.decoding.finish import Finish
from unspool.decoding.loop import Emitted
from unspool.decoding.rows import Rows
from unspool.decoding.scorer import Scorer
from unspool.decoding.select import NO_TOKEN
from unspool.decoding.strategies.base import Strategy
from unspool.decoding.strategies.turns import TokenTurns
from unspool.kernels.sending import Fetched, fetch


@dataclass(slots=True)
class Flight:
    """A step's tokens on their way to the host."""

    numbers: list[int]  # the rows of the call that the step was launched for
    width: int  # of the history, these tokens included
    tokens: Fetched  # (rows,) int64

    @classmethod
    def launch(cls, tokens: torch.Tensor, rows: Rows) -> Flight:
        """Send the tokens (rows,) of the step just launched."""
        fetched = fetch(tokens)
        rows.expect_last(fetched)
        return cls(list(rows.numbers), max(rows.ends), fetched)

    def land(self) -> list[int]:
        """The tokens, once they are there."""
        tokens: list[int] = self.tokens.read().tolist()
        return tokens


@dataclass(slots=True)
class AheadTurns(TokenTurns):
    """`TokenTurns` whose next step is launched before this one's tokens are read."""

    flights: deque[Flight] = field(default_factory=deque)
    is_first: bool = True

    def turn(self) -> Emitted:
        """Launch the next step, then read the last one's tokens and see who is done."""
        if not self.flights:
            self._launch()
        flight = self.flights.popleft()
        if not self.is_first and not self.finish.ends_at(flight.width):
            self._launch()
        self.is_first = False  # the first token is emitted before the step that follows it is captured
        new_tokens = flight.land()
        if NO_TOKEN in new_tokens:
            self._raise_no_token(flight, new_tokens)
        emitted = Emitted({}, {})
        reasons = self.finish.explain_tokens(new_tokens, flight.width)
        for number, token, reason in zip(flight.numbers, new_tokens, reasons, strict=True):
            if number in self.reasons:
                continue  # it ended while this step was under way
            emitted.tokens[number] = [token]
            if reason is not None:
                emitted.finished[number] = self.reasons[number] = reason
        if self.rows_may_leave and emitted.finished:
            self._let_leave()
        return emitted

    def _launch(self) -> None:
        chosen = self.strategy.step(self.rows).tokens  # (rows, 1)
        self.rows.append(chosen)
        self.flights.append(Flight.launch(chosen[:, 0], self.rows))

    def close(self) -> None:
        """Undo the steps whose tokens nobody has read."""
        num_flights = len(self.flights)
        self.flights.clear()
        if num_flights and self.rows.numbers:
            self.strategy.forget(num_flights)
            self.rows.drop(num_flights)

    def _raise_no_token(self, flight: Flight, new_tokens: list[int]) -> None:
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
    return (
        rows.device.type == "cuda"
        and not finish.needs_history
        and not scorer.record.keeps_any
        and not scorer.has_custom_processors
        and (rows_may_leave or len(rows) == 1)
        and strategy.can_forget
    )
