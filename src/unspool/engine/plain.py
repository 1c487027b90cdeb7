"""Requests that decode token by token, stepped as one set of rows with settings of their own.

Each step is one pass over all of them (`ask`), one call of the processors that they have in common, and one draw. On a
GPU the next step is launched before this one's tokens are read; what the host learns from them comes one step late
then, and the token that a row got after its end is dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import inf
from typing import Any, Final

import torch

from unspool.cache import PagedCache
from unspool.cache.paged.joint import let_go, list_blocks
from unspool.decoding.among import PlainParts
from unspool.decoding.prompts import Prompts
from unspool.decoding.record import fetch_logprobs
from unspool.decoding.rows import Rows
from unspool.decoding.select import take_likeliest
from unspool.engine.chains import Chain, JoinedDraw, Step
from unspool.engine.flights import Flight, Landed, Lineup, PlainRow, Runway
from unspool.kernels.sending import fetch, send
from unspool.protocols import LAST, Ask, Forward, Model, Want

OnLeave = Callable[["PlainRow", list[int], int], None]
"""Called with a row that leaves, its blocks, and how many positions they hold."""

LIKELIEST: Final = Want(is_brief=True, likeliest_only=True)
BRIEF: Final = Want(is_brief=True)
_PAD = 0  # stands where a row has no token; processors get what is padding


@dataclass(slots=True)
class Arrival:
    """Rows whose tokens so far have been read, and what follows them."""

    parts: PlainParts
    rows: list[PlainRow]
    index: list[int]  # which row of the forward pass and of the cache each continues
    width: int  # columns that they would have alone
    forward: Forward
    cache: Any  # of blocks, or of the model's own kind


_Found = tuple[list[int], torch.Tensor]
"""Places of rows, and the tokens (places,) that were chosen for them."""


@dataclass(slots=True)
class _Member:
    row: PlainRow
    num_top: int | None


class PlainRows:
    """All rows that decode token by token, their keys, and the chains of processors that choose for them."""

    def __init__(self, model: Model, cache: PagedCache | None, on_leave: OnLeave | None) -> None:
        self._model = model
        self._on_leave = on_leave
        # Without one it is the first rows' own, which others join: an encoder-decoder's, or one of states.
        self.cache: Any = cache
        self._rows: Rows | None = None
        self._members: list[_Member] = []
        self._chains: list[Chain] = []
        self._joined: JoinedDraw | None = None  # those that are drawn in one call, if they are known
        self._knows_joined = False
        self._order: tuple[list[int], torch.Tensor | None] | None = None  # places, and what puts these in order
        self._arrivals: list[Arrival] = []
        self._flights: deque[Flight] = deque()
        self._num_steps = 0  # that were launched
        self._runway = Runway()
        self._lineup: Lineup | None = None  # the members' rows, until others come or somebody begins to wait for them
        self._has_listeners = False  # somebody has begun to
        self._want = LAST  # brief ones if nobody changes or keeps what passes return
        self._reads_host = False  # whether a processor looks at the rows' tokens on the host
        self._fed: torch.Tensor | None = None  # the rows' last tokens, if the next pass has them already
        self._reported: dict[int, list[int]] = {}  # by how many are wanted: places whose log-probabilities are
        self._reported_at: dict[int, slice | torch.Tensor] = {}  # the same as a part of all rows, or on the device
        self._next_leave = inf  # the number of the step after which somebody leaves
        self.runs_ahead = model.device.type == "cuda"
        self.failed: dict[Any, Exception] = {}  # owners whose processors raised in the last step, and what

    def __len__(self) -> int:
        return len(self._members)

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to step and nothing on its way."""
        return not (self._members or self._arrivals or self._flights)

    @property
    def num_chains(self) -> int:
        """Groups of rows whose processors are called once."""
        return len(self._chains)

    # --- a step --------------------------------------------------------------------------------------------
    def ask(self) -> Ask | None:
        """The pass over every row's last token; None if there are no rows."""
        if self._rows is None:
            return None
        if self._reads_host:
            self._rows.fetch_history()  # behind the pass, a copy would wait for it
        tokens = self._rows.newest if self._fed is None else self._fed
        if tokens is None:
            tokens, _ = self._rows.unread(self.cache.lengths)
        return Ask(self._model, self.cache, tokens, None, self._want)

    def listen(self) -> None:
        """Look again whose tokens are waited for; from any thread."""
        self._has_listeners = True

    def admit(self, arrival: Arrival) -> None:
        """Let rows in with the next step, in which their first tokens are chosen."""
        self._arrivals.append(arrival)

    def launch(self, forward: Forward | None) -> None:
        """Choose every row's next token from the pass that was asked for, and what the arrivals' last passes gave."""
        logits = [] if forward is None else [forward.logits]
        likeliest = [] if forward is None else [forward.likeliest]
        for arrival in self._arrivals:
            picked = _pick_rows(arrival)
            if picked.likeliest is None and forward is not None and not forward.logits.shape[1]:
                picked.likeliest = take_likeliest(picked.logits.float())  # of the others nothing else is known
            logits.append(picked.logits)
            likeliest.append(picked.likeliest)
        if not logits:
            return
        edges = self._enter_arrivals() if self._arrivals else []
        assert self._rows is not None
        found = [one for one in likeliest if one is not None]
        step = Step(
            self._rows,
            logits,
            None if len(found) < len(likeliest) else found[0] if len(found) == 1 else torch.cat(found),
        )
        tokens = self._choose(step)
        self._fed = forward.fed if forward is not None and tokens is forward.likeliest else None
        if self._fed is not None and forward is not None and forward.log is not None:
            self._rows.append_logged(forward.log)
        else:
            self._rows.append(tokens[:, None])
        if self._reads_host and self._rows.expects_last:
            self._rows.expect_last(fetch(tokens))
        if self._has_listeners:
            self._has_listeners, self._lineup = False, None
        if self._lineup is None:
            self._lineup = Lineup([member.row for member in self._members])
        self._num_steps += 1
        ending: list[PlainRow] = []
        if self._num_steps >= self._next_leave:
            rows = self._lineup.rows
            at_end = [place for place, row in enumerate(rows) if row.last_step <= self._num_steps]
            ending, edges = [rows[place] for place in at_end], edges + at_end
        flight = self._runway.launch(self._lineup, tokens, edges)
        if self._reported:
            self._fetch_logprobs(step.logits, tokens, flight)
        self._flights.append(flight)
        if ending:
            self.remove(ending)

    def _follow_members(self) -> None:
        """Work out anew what depends on who is there."""
        self._lineup = self._fed = self._joined = None
        self._knows_joined = False
        chains = self._chains
        self._reads_host = any(chain.reads_host for chain in chains)
        is_brief = len(chains) == 1 and chains[0].is_greedy and chains[0].is_whole(len(self._members))
        self._reported, self._reported_at = {}, {}
        for place, member in enumerate(self._members):
            if member.num_top is not None:
                self._reported.setdefault(member.num_top, []).append(place)
        self._want = LAST if not is_brief else BRIEF if self._reported else LIKELIEST
        self._next_leave = min((member.row.last_step for member in self._members), default=inf)

    def land(self) -> list[Landed]:
        """The tokens of steps that nobody has seen, step by step; on a GPU not of the last one while others follow."""
        return self._land(1 if self.runs_ahead and (self._members or self._arrivals) else 0)

    def land_all(self) -> list[Landed]:
        """The tokens of all steps that were launched."""
        return self._land(0)

    def _land(self, num_kept: int) -> list[Landed]:
        landed = []
        while len(self._flights) > num_kept:
            landed.append(self._runway.land(self._flights.popleft()))
        return landed

    def _choose(self, step: Step) -> torch.Tensor:
        if len(self._chains) == 1:
            chain = self._chains[0]
            try:
                if chain.is_whole(len(self._members)):
                    return chain.choose(step)
            except Exception:
                pass  # found out whose it is below
        left = list(self._chains)
        found: list[_Found] = []
        if not self._knows_joined:
            self._joined, self._knows_joined = JoinedDraw.find(left, step.device), True
        if self._joined is not None:
            try:
                found.append((self._joined.places, self._joined.choose(step)))
                left = [chain for chain in left if chain not in self._joined.chains]
            except Exception:
                self._joined = None  # found out whose it is below
        for chain in left:
            try:
                found.append((chain.places, chain.choose(step)))
            except Exception as error:
                found += self._choose_apart(chain, step, error)
        return self._put_in_order(found)

    def _put_in_order(self, found: Sequence[_Found]) -> torch.Tensor:
        """The tokens of all rows, from those of rows at some places."""
        tokens = torch.cat([tokens for _, tokens in found])
        places = [place for own, _ in found for place in own]
        if self._order is None or self._order[0] != places:  # kept: it changes only if rows come or go
            is_sorted = places == list(range(len(places)))
            index = sorted(range(len(places)), key=places.__getitem__)
            self._order = places, None if is_sorted else send(index, tokens.device)
        order = self._order[1]
        return tokens if order is None else tokens.index_select(0, order)

    def _owners_of(self, chain: Chain) -> dict[Any, list[int]]:
        """The places in a chain of every owner's rows."""
        owners: dict[Any, list[int]] = {}
        for at, place in enumerate(chain.places):
            owners.setdefault(self._members[place].row.owner, []).append(at)
        return owners

    def _choose_apart(self, chain: Chain, step: Step, error: Exception) -> list[_Found]:
        """Let every owner of a chain that raised choose alone, and note whose processors it was."""
        owners, found = self._owners_of(chain), []

        def fail(places: list[int]) -> None:
            found.append((places, torch.zeros(len(places), dtype=torch.int64, device=step.device)))

        if len(owners) == 1:
            self.failed[next(iter(owners))] = error
            fail(chain.places)
            return found
        self._chains.remove(chain)
        for owner, at in owners.items():
            chosen = chain.processors.select_rows(torch.tensor(at))
            alone = Chain(chosen, chain.do_sample, [chain.places[one] for one in at], chain.shift)
            self._chains.append(alone)
            try:
                found.append((alone.places, alone.choose(step)))
            except Exception as own_error:
                self.failed[owner] = own_error
                fail(alone.places)
        return found

    def _fetch_logprobs(self, logits: torch.Tensor, tokens: torch.Tensor, flight: Flight) -> None:
        for num_top, places in self._reported.items():
            part = self._reported_at.get(num_top)
            if part is None:
                side_by_side = range(places[0], places[-1] + 1)
                is_span = places == list(side_by_side)
                part = slice(side_by_side.start, side_by_side.stop) if is_span else send(places, logits.device)
                self._reported_at[num_top] = part
            if isinstance(part, slice):
                given, chosen = logits[part], tokens[part]
            else:
                given, chosen = logits.index_select(0, part), tokens.index_select(0, part)
            flight.reported.append((places, fetch_logprobs(given, chosen, num_top)))

    # --- rows come and go ------------------------------------------------------------------------------------
    def _enter_arrivals(self) -> list[int]:
        """Let the arrivals in, and return their places."""
        arrivals, self._arrivals = self._arrivals, []
        rows = [row for arrival in arrivals for row in arrival.rows]
        new = _make_rows(rows, self._model.device)
        first = len(self._members)
        numbers = range(first, first + len(rows))
        shifts = [0, 0] if self._rows is None else self._rows.admit([new])
        if self._rows is None:
            self._rows = new
        width = max(self._rows.ends)
        for chain in self._chains:
            chain.shift += shifts[0]
        at = first
        for cache, held in groupby(arrivals, key=lambda arrival: arrival.cache):  # some were read together
            index = [row for arrival in held for row in arrival.index]
            if index != list(range(len(cache.lengths))):
                cache.select_rows(index)
            self._join(cache)
        for arrival in arrivals:
            self._members += [_Member(row, arrival.parts.num_top) for row in arrival.rows]
            for row in arrival.rows:
                row.last_step = inf if row.num_left is None else self._num_steps + row.num_left
            places = range(at, at + len(arrival.rows))
            at = places.stop
            numbers_of = torch.tensor([row.number for row in arrival.rows])
            is_whole = len(arrival.rows) == len(arrival.parts.seeds)
            processors = arrival.parts.processors if is_whole else arrival.parts.processors.select_rows(numbers_of)
            chain = Chain(processors, arrival.parts.do_sample, places, width - arrival.width)
            if not any(known.admit(chain) for known in self._chains):
                self._chains.append(chain)
        self._follow_members()
        return list(numbers)

    def _join(self, cache: Any) -> None:
        if self.cache is None:
            self.cache = cache
            return
        self.cache.join(cache)
        _let_go(cache)

    def remove(self, rows: Sequence[PlainRow]) -> None:
        """Let rows go; the last ones take the places of those that leave, so that few move."""
        for row in rows:
            row.has_left = True
        leaving = [place for place, member in enumerate(self._members) if member.row.has_left]
        if not leaving:
            return
        if self._on_leave is not None:
            for place in leaving:
                self._on_leave(self._members[place].row, list_blocks(self.cache, place), self.cache.lengths[place])
        index = list(range(len(self._members)))
        num_staying = len(index) - len(leaving)
        staying_last = iter([place for place in index[num_staying:] if not self._members[place].row.has_left])
        for place in leaving:
            if place < num_staying:
                index[place] = next(staying_last)
        del index[num_staying:]
        self._members = [self._members[place] for place in index]
        if index or isinstance(self.cache, PagedCache):
            self.cache.select_rows(index)
        moved = {old: new for new, old in enumerate(index)}
        self._chains = [chain for chain in self._chains if chain.keep(moved)]
        self._follow_members()
        if not index:
            self._rows = None
            if isinstance(self.cache, PagedCache):
                self.cache.lengths = []
            else:
                self.cache = None
            return
        assert self._rows is not None
        self._rows.select(index)

    def drop(self, owner: Any) -> None:
        """Forget all rows of a request: those that run, those that wait for the next step."""
        for arrival in [one for one in self._arrivals if one.rows[0].owner is owner]:
            self._arrivals.remove(arrival)
            _let_go(arrival.cache)
        rows = [member.row for member in self._members if member.row.owner is owner]
        if rows:
            self.remove(rows)

    def take_out(self, owner: Any) -> PagedCache | None:
        """Let all rows of a request go, and return what they hold; None if it has no rows that were stepped."""
        places = sorted(self.find_places(owner), key=lambda place: self._members[place].row.number)
        if not places or not isinstance(self.cache, PagedCache):
            self.drop(owner)
            return None
        taken = self.cache.take_rows(places)
        self.remove([self._members[place].row for place in places])
        return taken

    def find_places(self, owner: Any) -> list[int]:
        """Where a request's rows stand."""
        return [place for place, member in enumerate(self._members) if member.row.owner is owner]

    def close(self) -> None:
        """Give all blocks back."""
        for arrival in self._arrivals:
            _let_go(arrival.cache)
        self._arrivals, self._members, self._chains, self._rows = [], [], [], None
        self._follow_members()
        self._flights.clear()
        self._order, self._runway = None, Runway()
        self.failed.clear()
        _let_go(self.cache)
        if not isinstance(self.cache, PagedCache):
            self.cache = None


def _let_go(cache: Any) -> None:
    """Give back the blocks of a cache, if it has any."""
    if isinstance(cache, PagedCache):
        let_go(cache)


def _pick_rows(arrival: Arrival) -> Forward:
    """What an arrival's last pass gave, a row for each of its rows."""
    forward, index = arrival.forward, arrival.index
    if index == list(range(forward.logits.shape[0])):
        return forward
    chosen = send(index, forward.logits.device)
    likeliest = None if forward.likeliest is None else forward.likeliest.index_select(0, chosen)
    return Forward(forward.logits.index_select(0, chosen), likeliest=likeliest)


def _make_rows(rows: Sequence[PlainRow], device: torch.device) -> Rows:
    """Rows side by side that end in one column."""
    lengths = [len(row.text) for row in rows]
    width = max(lengths)
    ids = torch.full((len(rows), width), _PAD, dtype=torch.int64, pin_memory=device.type == "cuda")
    filled = ids.numpy()
    for place, row in enumerate(rows):
        filled[place, width - len(row.text) :] = row.text
    made = Rows(Prompts(ids.to(device, non_blocking=True), lengths, hides_padding=True), _PAD)
    made.know_history(ids)
    made.seeds = send([row.seed for row in rows], device)
    return made
