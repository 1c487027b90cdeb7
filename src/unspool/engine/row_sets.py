"""Requests that do more than choose one token per row, stepped as sets of rows: one for each kind of steps.

A request reads its prompts in a run of its own (`special_run.py`). Then its turns join those of the set of its kind, if
theirs can be shared: one pass, one call of the processors, one choice and one look at the tokens for all of them.
Requests come and go between two turns. What goes wrong in a turn may be anybody's: then all requests of the set begin
again, each alone, and the one at fault ends with its error.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

from unspool.cache import PagedCache
from unspool.cache.paged.joint import let_go, list_blocks
from unspool.decoding.joining import JoiningTurns
from unspool.decoding.loop import Emitted
from unspool.engine.passes import PassJob
from unspool.engine.suspended import Suspended
from unspool.engine.tasks import SpecialTask


@dataclass(frozen=True, slots=True)
class _Owner:
    """Whose a row of a set is."""

    task: SpecialTask
    row: int  # of the request


@dataclass(slots=True)
class _Member:
    """A request of a set."""

    numbers: range  # of its rows; what was row `i` of the request is the `i`-th
    passes_before: int  # its passes less those of the set, when it came in


class RowSet:
    """Requests whose rows are stepped together."""

    def __init__(self, task: SpecialTask, turns: JoiningTurns, cache: PagedCache) -> None:
        self._turns, self._cache = turns, cache
        numbers = range(task.run.num_rows)
        self._members = {task: _Member(numbers, task.run.stats.forward_passes)}
        self._owners = {number: _Owner(task, number) for number in numbers}
        self._num_turns = 0
        self._work: Suspended | None = None  # the turn that is under way
        self._leaving: list[range] = []  # rows that leave when it is over

    def __len__(self) -> int:
        return len(self._members)

    @property
    def tasks(self) -> list[SpecialTask]:
        """The requests that have not ended."""
        return list(self._members)

    @property
    def is_fresh(self) -> bool:
        """Whether no token of it was chosen yet, so that only others like it can join."""
        return self._turns.reader.is_fresh

    @property
    def is_at_rest(self) -> bool:
        """Whether no turn is under way."""
        return self._work is None

    @property
    def waits(self) -> bool:
        """Whether its turn waits for a copy."""
        return self._work is not None and self._work.waits

    # --- a turn ------------------------------------------------------------------------------------------
    def begin(self) -> None:
        """Begin a turn, up to where it asks for a pass, or waits."""
        self._work = Suspended(self._turns.turn)
        self._num_turns += 1
        self._work.start()

    def make_job(self) -> PassJob | None:
        """The pass that its turn asks for; None if it waits for none."""
        if self._work is None or self._work.waits or self._work.is_done:
            return None
        return PassJob(self._work.ask)

    def take(self, job: PassJob) -> None:
        """Go on with the answer to a job, or with its error."""
        assert self._work is not None
        if job.forward is None:
            assert job.error is not None
            self._work.throw(job.error)
        else:
            self._work.take(job.forward, job.ask)

    def go_on(self) -> None:
        """Go on once the copy is there that the turn waits for."""
        assert self._work is not None
        self._work.go_on()

    def hand_out(self) -> list[SpecialTask] | None:
        """If the turn is over: give every request what it wrote; those that have ended, which have left."""
        if self._work is None or not self._work.is_done:
            return None
        emitted: Emitted = self._work.value
        self._work = None
        ended: list[SpecialTask] = []
        owners, logprobs, finished = self._owners, emitted.logprobs, emitted.finished
        for number, tokens in emitted.tokens.items():
            owner = owners.get(number)
            if owner is not None:  # else it has been dropped
                owner.task.note_tokens(owner.row, tokens, logprobs.get(number), finished.get(number))
        for task, member in list(self._members.items()):
            if not task.has_news:
                continue
            if task.hand_over(member.passes_before + self._num_turns):
                self._forget(task)
                ended.append(task)
        leaving, self._leaving = self._leaving, []
        for numbers in leaving:
            self._drop_rows(numbers)
        return ended

    # --- requests come and go ------------------------------------------------------------------------------
    def admit(self, others: Sequence[RowSet]) -> None:
        """Take in all requests of other sets; all are at rest."""
        for other in others:
            self._cache.join(other._cache)
            let_go(other._cache)
        firsts = self._turns.admit([other._turns for other in others], self._cache)
        for other, first in zip(others, firsts, strict=True):
            for task, member in other._members.items():
                numbers = range(first + member.numbers.start, first + member.numbers.stop)
                self._members[task] = _Member(numbers, member.passes_before + other._num_turns - self._num_turns)
            self._owners |= {first + number: owner for number, owner in other._owners.items()}

    def count_held(self) -> None:
        """Let the scheduler know what every request holds."""
        for task, member in self._members.items():
            places = self._turns.find_places(member.numbers)
            task.entry.held = len({block for place in places for block in list_blocks(self._cache, place)})

    def drop(self, task: SpecialTask) -> None:
        """Let a request go before it has ended; if a turn is under way its rows leave after that."""
        numbers = self._members[task].numbers
        task.hand_over(self._members[task].passes_before + self._num_turns)
        self._forget(task)
        if self._work is None:
            self._drop_rows(numbers)
        else:
            self._leaving.append(numbers)

    def _forget(self, task: SpecialTask) -> None:
        for number in self._members.pop(task).numbers:
            self._owners.pop(number, None)

    def _drop_rows(self, numbers: range) -> None:
        if self._members:  # else all of it goes
            self._turns.drop(numbers)

    def close(self) -> None:
        """End it, and give its blocks back."""
        if self._work is not None:
            self._work.stop()
            self._work = None
        self._members.clear()
        self._owners.clear()
        let_go(self._cache)


class RowSets:
    """All sets: of a kind one, and those that are about to join it."""

    def __init__(
        self,
        on_end: Callable[[SpecialTask], None],
        on_fault: Callable[[Sequence[SpecialTask], Exception], None],
    ) -> None:
        self._on_end, self._on_fault = on_end, on_fault
        self._sets: dict[Hashable, list[RowSet]] = {}
        self._set_of: dict[SpecialTask, RowSet] = {}
        self._awaited: list[RowSet] = []  # those that wait for copies from the device

    def __len__(self) -> int:
        return len(self._set_of)

    def __contains__(self, task: SpecialTask) -> bool:
        return task in self._set_of

    def __iter__(self) -> Iterator[RowSet]:
        return iter([one for sets in self._sets.values() for one in sets])

    def admit(self, task: SpecialTask, turns: JoiningTurns, cache: PagedCache) -> None:
        """Let a request in whose prompts are read, with the next turn."""
        made = self._set_of[task] = RowSet(task, turns, cache)
        self._sets.setdefault(task.kind, []).append(made)

    def drop(self, task: SpecialTask) -> None:
        """Let a request go before it has ended."""
        held = self._set_of.pop(task)
        try:
            held.drop(task)
        except Exception as error:
            self._fail([held], error)
        self._tidy(held)

    def count_held(self) -> None:
        """Let the scheduler know what every request holds."""
        for one in self:
            one.count_held()

    def begin_turns(self) -> None:
        """Begin the next turn of every set; those of one kind that can be one become one."""
        for sets in list(self._sets.values()):
            self._merge(sets)
            for one in [one for one in sets if one.is_at_rest and one.is_fresh]:
                self._advance(one, one.begin)  # it needs no pass to choose first tokens
            self._merge(sets)
            for one in [one for one in sets if one.is_at_rest]:
                self._advance(one, one.begin)

    def _merge(self, sets: list[RowSet]) -> None:
        for is_fresh in (True, False):
            alike = [one for one in sets if one.is_at_rest and one.is_fresh == is_fresh]
            if len(alike) < 2:
                continue
            first, *others = alike
            try:
                first.admit(others)
            except Exception as error:
                self._fail(alike, error)
                continue
            for other in others:
                sets.remove(other)
                self._set_of |= dict.fromkeys(other.tasks, first)

    def take(self, row_set: RowSet, job: PassJob) -> None:
        """Give a set the answer to what it asked."""
        self._advance(row_set, lambda: row_set.take(job))

    def await_copies(self) -> None:
        """Let sets go on that wait for copies, until all of them ask again or have ended their turns."""
        while self._awaited:
            awaited, self._awaited = self._awaited, []
            for one in awaited:
                if one.waits:
                    self._advance(one, one.go_on)

    def _advance(self, row_set: RowSet, action: Callable[[], None]) -> None:
        try:
            action()
            if row_set.waits:
                self._awaited.append(row_set)
                return
            ended = row_set.hand_out()
        except Exception as error:
            self._fail([row_set], error)
            return
        if ended is None:
            return
        for task in ended:
            del self._set_of[task]
            self._on_end(task)
        self._tidy(row_set)

    def _fail(self, row_sets: Sequence[RowSet], error: Exception) -> None:
        """End sets with an error that may be any of their requests'."""
        tasks = list(dict.fromkeys(task for one in row_sets for task in one.tasks))
        for task in tasks:
            self._set_of.pop(task, None)
        for one in row_sets:
            one.close()
            self._tidy(one)
        self._on_fault(tasks, error)

    def _tidy(self, row_set: RowSet) -> None:
        """Let a set go that is empty."""
        if len(row_set):
            return
        row_set.close()
        for kind, sets in list(self._sets.items()):
            if row_set in sets:
                sets.remove(row_set)
            if not sets:
                del self._sets[kind]

    def close(self) -> None:
        """End all sets, and give their blocks back."""
        for one in self:
            one.close()
        self._sets.clear()
        self._set_of.clear()
        self._awaited.clear()
