"""A replica: the engine's scheduler over a pool of blocks, with passes that take as long as a machine's."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from simulator.arrivals import Arrival
from simulator.book import Book
from unspool.engine.scheduler import Entry, Limits, Scheduler, Status

BLOCK = 64  # positions, as the engine's default


class Machine(NamedTuple):
    """What a pass costs on a machine with a model, in milliseconds, and how much fits."""

    base: float  # reading the weights
    per_row: float
    per_key: float  # a position of a row that decodes
    per_token: float  # a prompt's
    max_rows: int
    blocks: int
    tokens_per_pass: int


# Fitted to docs/performance.md: steps at 1 and 64 rows ("The step on an H200", "Decoding on a CPU"), what attention
# adds with keys, and the rest of "The engine"'s work for prompts. Blocks: what the engine takes there by default.
MACHINES = {
    "h200-8b": Machine(3.75, 0.010, 3.25e-5, 0.026, 256, 12_700, 16_384),
    "h200-1b": Machine(0.72, 0.0067, 8.0e-6, 0.005, 256, 16_384, 16_384),
    "cpu-135m": Machine(2.64, 1.72, 3.8e-3, 2.08, 32, 2_048, 512),
}


class Pool:
    """The blocks of a replica, as its scheduler sees them."""

    block_size = BLOCK

    def __init__(self, replica: Replica, num_blocks: int) -> None:
        self._replica, self.free = replica, num_blocks

    def has(self, count: int) -> bool:
        """Whether so many blocks can be taken now."""
        return count <= self.free

    def release(self, number: int) -> None:
        """Take an entry's blocks: it will read its text again."""
        self._replica.give_up(number)


class Replica:
    """An engine: its scheduler, and what its rows hold."""

    def __init__(self, machine: Machine, book: Book, max_waiting: int) -> None:
        self.machine, self._book = machine, book
        self._pool = Pool(self, machine.blocks)
        limits = Limits(machine.max_rows, machine.blocks, machine.tokens_per_pass, max_waiting)
        self.scheduler = Scheduler(limits, self._pool)
        self._steps = 0  # that running rows have taken
        self._keys = 0  # positions of rows that run
        self._due = [0] * BLOCK  # rows that take a block with the step of that number, modulo the size
        self._running: dict[int, tuple[int, int, int]] = {}  # a row's first step, its length then, and its last step
        self._ends: defaultdict[int, list[int]] = defaultdict(list)  # rows by their last step
        self._left: dict[int, int] = {}  # tokens that are still to come
        self._reads: dict[int, int] = {}
        self.is_busy, self.is_up = False, True
        self._began, self._busy_seconds = 0.0, 0.0  # the pass that runs, and those that ended

    def __len__(self) -> int:
        return len(self.scheduler)

    @property
    def num_running(self) -> int:
        """Rows that decode."""
        return len(self._running)

    def add(self, number: int, request: Arrival, now: float) -> bool:
        """Put a request into the queue; False if there is no room, or never will be."""
        entry = Entry(number, 1, unread=request.prompt, length=request.prompt, arrived=now)
        entry.reserve = -(-(request.prompt + request.new) // BLOCK)
        if self.scheduler.is_full or self.scheduler.explain_refusal(entry) is not None:
            return False
        self._left[number] = request.new
        self.scheduler.add(entry)
        return True

    def begin(self, now: float) -> float | None:
        """Begin a pass; when it ends, or None if there is nothing to do."""
        turn = self.scheduler.plan(now)
        self._book.preemptions += len(turn.preempted)
        self._reads = turn.reads
        rows, tokens = len(self._running), sum(turn.reads.values())
        self.is_busy = bool(rows or tokens)
        if not self.is_busy:
            return None
        cost = self.machine
        seconds = cost.base + cost.per_row * rows + cost.per_key * self._keys + cost.per_token * tokens
        self._began = now
        self._book.note_pass(now, seconds / 1000, rows, tokens, self.scheduler.num_waiting)
        return now + seconds / 1000

    def end(self, now: float) -> None:
        """End a pass: rows have a token more, prompts are read."""
        self._busy_seconds += now - self._began
        rows = len(self._running)
        if rows:
            self._pool.free -= self._due[self._steps % BLOCK]
            self.scheduler.note_step()
            self._steps += 1
            self._keys += rows
            for number in self._ends.pop(self._steps, ()):
                if number in self._running and self._running[number][2] == self._steps:  # it was not sent back
                    self._finish(number, now)
        for number, columns in self._reads.items():
            self._read(number, columns, now)

    def _read(self, number: int, columns: int, now: float) -> None:
        scheduler, entry = self.scheduler, self.scheduler[number]
        read = entry.length - entry.unread + columns
        held = -(-read // BLOCK)
        self._pool.free -= held - entry.held
        entry.held = held
        scheduler.note_read(number, columns)
        if entry.status is not Status.RUNNING:
            return
        self._book.note_token(number, now)
        self._left[number] -= 1
        last = self._steps + self._left[number]
        self._running[number] = self._steps, entry.length, last
        self._keys += entry.length
        self._due[(self._steps - entry.length) % BLOCK] += 1
        if self._left[number] == 0:
            self._finish(number, now)
        else:
            self._ends[last].append(number)

    def _leave(self, number: int) -> int:
        """Take a row out of the steps; how many positions it has."""
        began, length, _ = self._running.pop(number)
        self._due[(began - length) % BLOCK] -= 1
        taken = self._steps - began
        self._keys -= length + taken
        self._pool.free += -(-(length + taken) // BLOCK)
        self._left[number] -= taken
        return length + taken

    def _finish(self, number: int, now: float) -> None:
        self._leave(number)
        del self._left[number]
        self.scheduler.end(number)
        self._book.note_done(number, now)

    def give_up(self, number: int) -> None:
        """Give back what a row holds; it will read its text again."""
        entry = self.scheduler[number]
        if number in self._running:
            entry.length = self._leave(number) + 1  # the last token was not read yet
        else:
            self._pool.free += entry.held
        entry.unread, entry.held = entry.length, 0

    def fail(self, now: float) -> list[int]:
        """Lose everything; the requests that it had."""
        self._busy_seconds = self.count_busy_seconds(now)
        had = list(self._left)
        self._pool.free = self.machine.blocks
        self.scheduler = Scheduler(self.scheduler.limits, self._pool)
        self._running, self._left, self._reads = {}, {}, {}
        self._ends.clear()
        self._due, self._steps, self._keys = [0] * BLOCK, 0, 0
        self.is_busy = self.is_up = False
        return had

    def count_busy_seconds(self, now: float) -> float:
        """How long it has computed; of a pass that has not ended, what is over of it."""
        return self._busy_seconds + (now - self._began if self.is_busy else 0.0)

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody holds."""
        return self._pool.free
