"""Rows that are stepped together, and their tokens on the way from the device to the host."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, Protocol

import numpy as np
import torch

from unspool.decoding.record import PendingLogprobs, Reported
from unspool.decoding.select import NO_TOKEN
from unspool.engine.prefixes import BlockNames


class Owner(Protocol):
    """Whose rows they are."""

    @property
    def quick_ends(self) -> Collection[int] | None:
        """The tokens that end its row, if little else does; None if every step of its rows must be looked at."""
        ...

    @property
    def known_ends(self) -> Mapping[int, bool] | None:
        """Other tokens with which its row may end, or can't, as far as that is known; None if there are none."""
        ...

    @property
    def is_heard(self) -> bool:
        """Whether somebody waits for each of its tokens."""
        ...


@dataclass(slots=True, eq=False)
class PlainRow:
    """One row of a plain request."""

    owner: Any  # whose it is: an `Owner`
    number: int  # which of the request's rows
    tokens: list[int]  # all of them, prompt included
    seed: int
    num_left: int | None  # tokens that it may get from where it comes in; None: no length ends it
    names: BlockNames  # of the blocks that hold them
    text: np.ndarray  # those that it comes in with
    is_done: bool = False
    has_left: bool = False  # it takes part in no more steps
    reported: list[Reported] = field(default_factory=list)  # its new tokens' log-probabilities, where they are wanted
    last_step: float = inf  # the number of the step that gives it its last token, whatever that is


class Lineup:
    """The rows of consecutive steps, and what is to be looked at in the tokens of each.

    Most steps end no row and nobody waits for their tokens: then each token is appended to its row, and that is all.
    """

    def __init__(self, rows: list[PlainRow]) -> None:
        self.rows = rows
        self.enter = [row.tokens.append for row in rows]
        self.ends = frozenset(  # the tokens at which somebody may end; NO_TOKEN is an error
            (NO_TOKEN, *(token for row in rows if (ends := row.owner.quick_ends) is not None for token in ends))
        )
        self.heard = [
            place for place, row in enumerate(rows) if row.owner.quick_ends is not None and row.owner.is_heard
        ]
        self.watched = [  # rows that texts may end: with which tokens they can
            (place, known.get)
            for place, row in enumerate(rows)
            if row.owner.quick_ends is not None and (known := row.owner.known_ends) is not None
        ]
        self.others: dict[Any, list[int]] = {}  # by owner: rows that are looked at in every step
        for place, row in enumerate(rows):
            if row.owner.quick_ends is None:
                self.others.setdefault(row.owner, []).append(place)

    def find_noted(self, tokens: Sequence[int], edges: Sequence[int]) -> list[int]:
        """The places of quick rows that may have ended or whose tokens are waited for; `edges` are those that got
        their first token, or the last that they may get."""
        noted = [*edges, *self.heard] if edges or self.heard else []
        if self.watched:
            noted += [place for place, knows in self.watched if knows(tokens[place], True)]
        if not self.ends.isdisjoint(tokens):
            noted += [place for place, token in enumerate(tokens) if token in self.ends]
        return noted


@dataclass(slots=True)
class Landed:
    """A step's rows, and the token that each got."""

    lineup: Lineup
    tokens: list[int]
    edges: list[int]  # places of rows that got their first token, or the last that they may get
    reported: list[tuple[list[int], np.ndarray]]  # log-probabilities of the rows at these places, where wanted


@dataclass(slots=True)
class Flight:
    """A step's tokens on their way to the host."""

    lineup: Lineup
    tokens: torch.Tensor  # (rows,), on the way from a GPU a part of pinned memory
    edges: list[int]
    arrived: Any = None
    memory: torch.Tensor | None = None  # the pinned memory
    reported: list[tuple[list[int], PendingLogprobs]] = field(default_factory=list)  # of the rows at these places

    def land(self) -> Landed:
        """The tokens, once they are there."""
        if self.arrived is not None:
            self.arrived.synchronize()
        reported = [(places, found.read_numbers()) for places, found in self.reported]
        return Landed(self.lineup, self.tokens.tolist(), self.edges, reported)


class Runway:
    """Sends the tokens of steps to the host; pinned memory and events are used again once a step has landed."""

    def __init__(self) -> None:
        self._spare: list[tuple[torch.Tensor, torch.Tensor, Any]] = []  # memory, the part used last, an event
        self._stream: Any = None  # the driving thread's; asking for it takes longer than recording an event

    def launch(self, lineup: Lineup, tokens: torch.Tensor, edges: list[int]) -> Flight:
        """Send the tokens of the step just launched."""
        if tokens.device.type != "cuda":
            return Flight(lineup, tokens, edges)
        count = len(lineup.rows)
        if not self._spare or self._spare[-1][0].shape[0] < count:
            self._spare = []
            room = 1 << (count - 1).bit_length()
            event = torch.cuda.Event()
            memory = torch.empty(room, dtype=tokens.dtype, pin_memory=True)
            self._spare.append((memory, memory, event))
        host, part, event = self._spare.pop()
        if part.shape[0] != count:
            part = host[:count]
        part.copy_(tokens, non_blocking=True)
        if self._stream is None:
            self._stream = torch.cuda.current_stream(tokens.device)
        event.record(self._stream)
        return Flight(lineup, part, edges, event, host)

    def land(self, flight: Flight) -> Landed:
        """The tokens of a step, once they are there."""
        landed = flight.land()
        if flight.memory is not None:
            self._spare.append((flight.memory, flight.tokens, flight.arrived))
        return landed
