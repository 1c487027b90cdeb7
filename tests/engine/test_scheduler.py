"""The scheduler beside a simulated memory: nobody starves, no block leaks, budgets hold, every entry ends once."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unspool.engine.scheduler import PATIENCE, BlockUse, Entry, Limits, Scheduler, Status, Turn

BLOCK = 4


@dataclass
class Blocks:
    """Memory that only counts: blocks by entry, and what it takes to read an entry again."""

    total: int
    block_size: int = BLOCK
    held: dict[int, int] = field(default_factory=dict)
    scheduler: Scheduler | None = None
    texts: dict[int, int] = field(default_factory=dict)  # positions that an entry has to read again

    def has(self, count: int) -> bool:
        return self.total - sum(self.held.values()) >= count

    def take(self, number: int, count: int) -> None:
        assert self.has(count), "an admitted entry found too few blocks"
        self.held[number] = self.held.get(number, 0) + count
        self.scheduler[number].held = self.held[number]

    def release(self, number: int) -> None:
        entry, held = self.scheduler[number], self.held.pop(number, 0)
        if entry.can_move:
            entry.moved = held
        else:
            entry.unread = entry.length = self.texts[number]
        entry.held = 0

    def bring_back(self, number: int) -> None:
        entry = self.scheduler[number]
        moved, entry.moved = entry.moved, 0
        self.take(number, moved)


def make(total: int, *, max_rows: int = 8, budget: int = 16, max_waiting: int = 100) -> tuple[Scheduler, Blocks]:
    blocks = Blocks(total)
    blocks.scheduler = Scheduler(Limits(max_rows, total, budget, max_waiting), blocks)
    return blocks.scheduler, blocks


def count(positions: int) -> int:
    return -(-positions // BLOCK)


@dataclass
class Work:
    """What an entry is really going to do."""

    entry: Entry
    num_new: int
    done: int = 0


class Simulation:
    """Carries out what the scheduler decides, and checks it."""

    def __init__(self, total: int, max_rows: int, budget: int) -> None:
        self.scheduler, self.blocks = make(total, max_rows=max_rows, budget=budget)
        self.works: dict[int, Work] = {}
        self.ended: list[int] = []
        self.begun: set[int] = set()
        self.now = 0.0

    def add(self, work: Work) -> bool:
        entry = work.entry
        entry.arrived = self.now
        total = entry.num_rows * count(entry.length + work.num_new)
        entry.reserve = total
        self.note_wanted(entry)
        if self.scheduler.explain_refusal(entry) is not None:
            return False
        self.works[entry.number] = work
        self.blocks.texts[entry.number] = entry.length
        self.scheduler.add(entry)
        return True

    def end(self, number: int) -> None:
        if number in self.scheduler:
            self.scheduler.end(number)
        self.blocks.held.pop(number, None)
        self.ended.append(number)
        del self.works[number]

    def note_wanted(self, entry: Entry) -> None:
        """A movable entry's next pass, at most: what it has to read, or a step of every row."""
        entry.wanted = (entry.num_prompts * (2 + entry.unread // BLOCK)) if entry.unread else 2 * entry.num_rows

    def turn(self) -> Turn:
        self.now += 1.0
        turn = self.scheduler.plan(self.now)
        for number in turn.expired:
            self.end(number)
        for number in turn.admitted:
            entry = self.scheduler[number]
            if entry.can_move and number in self.begun:
                self.blocks.bring_back(number)
                if not entry.unread:
                    entry.status = Status.RUNNING
                    turn.reads.pop(number, None)
            self.begun.add(number)
        running = list(self.scheduler.find(Status.RUNNING))
        read = sum(columns * self.scheduler[number].num_prompts for number, columns in turn.reads.items())
        limit, num_running = self.scheduler.limits.tokens_per_pass, sum(entry.num_rows for entry in running)
        widest = max((self.scheduler[number].num_prompts for number in turn.reads), default=0)
        assert read <= max(limit - num_running, widest, 1)
        assert self.scheduler.num_rows <= self.scheduler.limits.max_rows
        spread = {entry.number for entry in running if entry.is_spread}
        self.scheduler.note_step()
        for number, columns in turn.reads.items():
            self.read(number, columns)
        for entry in running:
            self.step(entry, entry.number in spread)
        return turn

    def read(self, number: int, columns: int) -> None:
        entry = self.scheduler[number]
        before = entry.length - entry.unread
        self.blocks.take(number, entry.num_prompts * (count(before + columns) - count(before)))
        entry.is_spread = entry.num_rows > entry.num_prompts
        self.scheduler.note_read(number, columns)
        self.note_wanted(entry)

    def step(self, entry: Entry, is_spread: bool) -> None:
        work = self.works[entry.number]
        length = self.blocks.texts[entry.number]
        if is_spread:
            shares = length % BLOCK != 0
            copies = entry.num_rows - entry.num_prompts if shares else entry.num_rows
            self.blocks.take(entry.number, copies)
        elif length % BLOCK == 0:
            self.blocks.take(entry.number, entry.num_rows)
        if not entry.is_plain:
            entry.length, entry.is_spread = entry.length + 1, False
            self.note_wanted(entry)
        self.blocks.texts[entry.number] = length + 1
        work.done += 1
        if work.done >= work.num_new:
            self.end(entry.number)


@st.composite
def works(draw: st.DrawFn, number: int) -> Work:
    prompts = draw(st.sampled_from([1, 1, 1, 2]))
    rows = prompts * draw(st.sampled_from([1, 1, 2, 3]))
    length = draw(st.integers(1, 30))
    is_plain, can_move = draw(st.sampled_from([(True, False), (False, False), (False, True)]))
    deadline = draw(st.none() | st.integers(1, 60).map(float))
    entry = Entry(
        number,
        rows,
        prompts,
        unread=length,
        length=length,
        is_plain=is_plain,
        can_move=can_move,
        priority=draw(st.integers(-2, 2)),
        deadline=deadline,
    )
    return Work(entry, draw(st.integers(1, 25)))


@settings(max_examples=60)
@given(st.data())
def test_every_entry_ends_once_and_no_block_leaks(data: st.DataObject) -> None:
    simulation = Simulation(
        data.draw(st.integers(4, 40)), data.draw(st.integers(1, 8)), data.draw(st.sampled_from([1, 8, 64]))
    )
    taken = []
    for number in range(data.draw(st.integers(1, 12))):
        work = data.draw(works(number))
        if simulation.add(work):
            taken.append(number)
        for _ in range(data.draw(st.integers(0, 4))):
            simulation.turn()
        if simulation.works and data.draw(st.integers(0, 9)) == 0:  # cancelled, wherever it stands
            simulation.end(data.draw(st.sampled_from(sorted(simulation.works))))
    for _ in range(20_000):
        if not simulation.works:
            break
        simulation.turn()
    assert sorted(simulation.ended) == taken
    assert not len(simulation.scheduler) and not simulation.scheduler.num_waiting
    assert not simulation.blocks.held


def test_a_low_priority_waits_only_so_long() -> None:
    simulation = Simulation(total=8, max_rows=1, budget=8)
    simulation.add(Work(Entry(0, 1, unread=2, length=2, priority=-3), 2))
    number = 1
    while 0 not in simulation.ended:
        simulation.add(Work(Entry(number, 1, unread=2, length=2, priority=1), 2))
        number += 1
        simulation.turn()
    # Those that came within 4 levels of patience pass it, at three turns each; nobody later does.
    assert simulation.now <= 3 * 4 * PATIENCE + 10
    assert number > 10 and 0 in simulation.ended


def test_the_last_in_order_is_preempted_and_comes_back() -> None:
    simulation = Simulation(total=6, max_rows=4, budget=32)
    for number in range(3):
        simulation.add(Work(Entry(number, 1, unread=6, length=6), 10))
    turns = [simulation.turn() for _ in range(60)]
    preempted = [number for turn in turns for number in turn.preempted]
    assert preempted and preempted[0] == max(preempted) and 0 not in preempted
    assert simulation.ended[0] == 0 and sorted(simulation.ended) == [0, 1, 2]
    assert simulation.scheduler.num_preemptions == len(preempted)


def test_what_is_not_plain_is_moved_and_comes_back() -> None:
    simulation = Simulation(total=8, max_rows=6, budget=64)
    for number in range(3):
        simulation.add(Work(Entry(number, 2, unread=4, length=4, is_plain=False, can_move=True), 10))
    turns = [simulation.turn() for _ in range(80)]
    assert [number for turn in turns for number in turn.admitted][:2] == [0, 1]  # 8 blocks may do for both at first
    preempted = [number for turn in turns for number in turn.preempted]
    assert preempted and 0 not in preempted and simulation.ended == [0, 1, 2]
    assert simulation.scheduler.num_moved == 0


def test_what_was_promised_is_kept() -> None:
    simulation = Simulation(total=10, max_rows=8, budget=64)
    simulation.add(Work(Entry(0, 3, unread=4, length=4, is_plain=False), 8))  # 3 rows of 12 positions: 9 blocks
    simulation.add(Work(Entry(1, 1, unread=4, length=4), 8))
    turns = [simulation.turn() for _ in range(40)]
    assert turns[0].admitted == [0] and simulation.ended == [0, 1]
    assert not any(0 in turn.preempted for turn in turns)


def test_prompts_are_cut_only_if_they_must_be() -> None:
    scheduler, _ = make(100, budget=16)
    for number, unread in enumerate((10, 12, 40)):
        scheduler.add(Entry(number, 1, unread=unread, length=unread))
    assert scheduler.plan(0).reads == {0: 10}  # the second fits a pass of its own
    scheduler.note_read(0, 10)
    assert scheduler.plan(0).reads == {1: 12, 2: 3}  # the third must be cut anyway; row 0 takes one token
    scheduler.note_read(1, 12)
    scheduler.note_read(2, 3)
    assert scheduler.plan(0).reads == {2: 14}


def test_what_may_not_be_cut_is_read_whole() -> None:
    scheduler, _ = make(100, budget=16)
    for number, unread in enumerate((10, 40, 3)):
        scheduler.add(Entry(number, 1, unread=unread, length=unread, is_whole=True))
    assert scheduler.plan(0).reads == {0: 10}
    scheduler.note_read(0, 10)
    assert scheduler.plan(0).reads == {1: 40}
    scheduler.note_read(1, 40)
    assert scheduler.plan(0).reads == {2: 3}


@pytest.mark.parametrize(
    ("use", "length", "num_read", "expected"),
    [
        (BlockUse(), 9, 9, 3),
        (BlockUse(num_full=2, num_sliding=3, window=4), 40, 8, 2 * 10 + 3 * 4),
        (BlockUse(num_full=0, num_sliding=1, window=8), 6, 6, 2),
        (BlockUse(lag=7), 5, 5, 0),
        (BlockUse(lag=7), 16, 16, 3),
    ],
)
def test_blocks_of_rows(use: BlockUse, length: int, num_read: int, expected: int) -> None:
    assert use.count(length, num_read, BLOCK) == expected


def test_deadlines_end_entries_wherever_they_are() -> None:
    scheduler, _ = make(100, max_rows=1)
    scheduler.add(Entry(0, 1, unread=3, length=3, deadline=5.0))
    scheduler.add(Entry(1, 1, unread=3, length=3, deadline=6.0))
    assert scheduler.plan(1.0).admitted == [0]
    assert scheduler.plan(5.0).expired == [0] and 0 not in scheduler
    assert scheduler.plan(6.5).expired == [1] and not len(scheduler)


@pytest.mark.parametrize(
    ("entry", "told"), [(Entry(0, 9), "at most 8"), (Entry(0, 1, reserve=101), "101 blocks"), (Entry(0, 2), None)]
)
def test_what_can_never_run_is_refused(entry: Entry, told: str | None) -> None:
    scheduler, _ = make(100)
    refusal = scheduler.explain_refusal(entry)
    assert refusal is None if told is None else told in refusal


def test_the_queue_says_when_it_is_full() -> None:
    scheduler, _ = make(4, max_rows=1, max_waiting=2)
    for number in range(2):
        assert not scheduler.is_full
        scheduler.add(Entry(number, 1, unread=3, length=3))
    assert scheduler.is_full
    scheduler.plan(0)
    assert not scheduler.is_full
