"""Who decodes when: plain data, no tensors.

Entries wait in one queue, are admitted while rows and blocks last, read their prompts in pieces under a budget of
tokens per pass, and decode until they end. Blocks that an entry takes with its next pass are promised to it, so that an
entry that was admitted can go on. When blocks run out, the last entries in the order go back to the queue. What they
held is read again later, or it was moved to other memory and is brought back. Entries that can do neither are promised
all that they may ever take.

Plain entries that run are stepped together, so they are counted together: by the step at which their rows take their
next block. A turn in which nobody waits or reads costs the same however many run.

The order is by virtual arrival: a level of priority counts as `PATIENCE` seconds of waiting. Nothing that arrives later
than that can overtake, so nobody waits for ever.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, Protocol

_TURNS_BEFORE_MORE: Final = 256  # without a shortage, after which passes may be larger again
PATIENCE: Final = 10.0  # seconds of waiting that one level of priority is worth
LOWEST, HIGHEST = -100, 100  # priorities


class Status(Enum):
    """What an entry does."""

    WAITING = "waiting"
    READING = "reading"
    RUNNING = "running"


@dataclass(frozen=True, slots=True)
class BlockUse:
    """How many blocks of a pool a row takes."""

    num_full: int = 1  # tables of blocks that a row keeps
    num_sliding: int = 0  # tables whose blocks it gives back when they are out of a window's view
    window: int = 0
    lag: int = 0  # the last positions, which lie elsewhere

    @property
    def num_tables(self) -> int:
        """Blocks that a row takes at a time."""
        return self.num_full + self.num_sliding

    def count(self, length: int, num_read: int, size: int) -> int:
        """The most blocks of a row of that length, if a pass reads at most `num_read` of its positions."""
        seen = min(length, self.window + max(1, num_read) + size)  # a block is let go when all of it is out of view
        return self.num_full * max(0, -(-(length - self.lag) // size)) + self.num_sliding * -(-seen // size)


@dataclass(slots=True)
class Entry:
    """One request, as the scheduler sees it."""

    number: int
    num_rows: int  # that it decodes in: prompts times copies
    num_prompts: int = 1  # rows that it reads
    unread: int = 0  # columns that it has to read before it goes on
    length: int = 0  # positions per row, unread ones included; of a plain entry that runs: when it began to
    is_plain: bool = True  # it decodes token by token, and can be stopped at any moment
    reserve: int = 0  # blocks that it may take in all, if it is not plain
    can_move: bool = False  # it can be stopped too: what it holds is moved away and brought back. Else all is promised
    is_whole: bool = False  # what it reads is not cut
    wanted: int = 0  # the most blocks that what it waits for takes, if it can move
    moved: int = 0  # blocks that it needs to come back
    priority: int = 0
    arrived: float = 0.0
    deadline: float | None = None  # on the same clock as `arrived`
    held: int = 0  # blocks that its rows have
    is_spread: bool = False  # its rows share their last block: each takes one of its own with its next position
    status: Status = Status.WAITING
    num_preemptions: int = 0

    @property
    def order(self) -> tuple[float, int]:
        """Its place among all: lower comes first."""
        return self.arrived - PATIENCE * self.priority, self.number


class Memory(Protocol):
    """The blocks, as the scheduler sees them."""

    block_size: int

    def has(self, count: int) -> bool:
        """Whether so many blocks can be taken now."""
        ...

    def release(self, number: int) -> None:
        """Give back what an entry holds. Sets its `unread`, `length` and `held`, or `held` and `moved`."""
        ...


@dataclass(slots=True)
class Turn:
    """What one pass is to do."""

    expired: list[int] = field(default_factory=list)  # their deadline has passed: they are no longer known
    preempted: list[int] = field(default_factory=list)
    admitted: list[int] = field(default_factory=list)
    reads: dict[int, int] = field(default_factory=dict)  # columns of each entry to read now


@dataclass(slots=True)
class Limits:
    """How much there may be at once."""

    max_rows: int
    max_blocks: int
    tokens_per_pass: int
    max_waiting: int


class Scheduler:
    """Entries, and the decisions about them."""

    def __init__(self, limits: Limits, memory: Memory, use: BlockUse | None = None) -> None:
        self.limits, self._memory, self._use = limits, memory, use or BlockUse()
        self._entries: dict[int, Entry] = {}
        self._active: dict[int, Entry] = {}  # those that were admitted
        self._waiting: list[Entry] = []  # by order
        self._timed: dict[int, Entry] = {}  # those with a deadline
        self._others: dict[int, Entry] = {}  # those that were admitted, but for plain ones that run
        self._num_steps = 0  # of the plain entries
        self._due = [0] * memory.block_size  # rows that take a block with the step of that number, modulo the size
        self._phases: dict[int, tuple[int, int]] = {}  # plain entries that run: their place in that list, and rows
        self._spread: dict[int, Entry] = {}  # those of them whose rows part with the next step
        self.num_preemptions = 0
        self.on_short: Callable[[], None] = (
            _do_nothing  # called before blocks are taken: `held` may be of some time ago
        )
        # What passes may be as long as memory for larger ones is short.
        self._most_tokens, self._most_rows = limits.tokens_per_pass, limits.max_rows
        self._num_calm = 0  # turns since memory was short

    # --- what there is -------------------------------------------------------------------------------
    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, number: int) -> Entry:
        return self._entries[number]

    def __contains__(self, number: int) -> bool:
        return number in self._entries

    @property
    def num_waiting(self) -> int:
        """Entries in the queue."""
        return len(self._waiting)

    @property
    def num_rows(self) -> int:
        """Rows of the entries that were admitted."""
        return sum(entry.num_rows for entry in self._active.values())

    @property
    def num_moved(self) -> int:
        """Blocks that waiting entries need to come back."""
        return sum(entry.moved for entry in list(self._waiting))

    def find(self, status: Status) -> Iterator[Entry]:
        """The entries that were admitted and have a status."""
        return (entry for entry in self._active.values() if entry.status is status)

    def count_unread(self) -> int:
        """Tokens that the entries have to read; those that wait for room fill a pass."""
        if self._waiting:
            return self.limits.tokens_per_pass
        return sum(entry.unread * entry.num_prompts for entry in self._others.values())

    def explain_refusal(self, entry: Entry) -> str | None:
        """Why an entry can never be admitted; None if it can."""
        if entry.num_rows > self.limits.max_rows:
            return f"it decodes in {entry.num_rows} rows, and the engine in at most {self.limits.max_rows} (max_rows)"
        needed = self._count_least(entry)
        if needed > self.limits.max_blocks:
            size = self._memory.block_size
            return (
                f"it may need {needed} blocks of {size} positions, and the engine has {self.limits.max_blocks} in all "
                "(memory)"
            )
        return None

    def _count_least(self, entry: Entry) -> int:
        """Blocks that an entry needs to go on to its end, if it is alone."""
        return max(entry.reserve, self._count_blocks(entry))

    # --- entries come and go ---------------------------------------------------------------------------
    def add(self, entry: Entry) -> None:
        """Put an entry into the queue. Whether there is room in it is for the caller to ask (`is_full`)."""
        assert entry.number not in self._entries and entry.status is Status.WAITING
        self._entries[entry.number] = entry
        if entry.deadline is not None:
            self._timed[entry.number] = entry
        self._enqueue(entry)

    @property
    def most_tokens(self) -> int:
        """Tokens that a pass may read now; fewer than the limit while memory is short."""
        return self._most_tokens

    @property
    def is_full(self) -> bool:
        """Whether the queue takes no more."""
        return len(self._waiting) >= self.limits.max_waiting

    def end(self, number: int) -> None:
        """Forget an entry that has ended, wherever it stands."""
        entry = self._entries.pop(number)
        self._timed.pop(number, None)
        if self._active.pop(number, None) is None:
            self._waiting.remove(entry)
        self._others.pop(number, None)
        self._leave_steps(number)

    def _enqueue(self, entry: Entry) -> None:
        entry.status = Status.WAITING
        self._active.pop(entry.number, None)
        self._others.pop(entry.number, None)
        insort(self._waiting, entry, key=_by_order)

    @property
    def is_short(self) -> bool:
        """Whether the next turn has to take blocks from somebody."""
        return not self._memory.has(self._count_promised())

    # --- a turn ----------------------------------------------------------------------------------------
    def plan(self, now: float) -> Turn:
        """Decide what the next pass does."""
        turn = Turn()
        self._grow_again()
        if self._timed:
            for entry in list(self._timed.values()):
                if entry.deadline is not None and now >= entry.deadline:
                    turn.expired.append(entry.number)
                    self.end(entry.number)
        self._make_room(turn)
        self._admit(turn)
        self._share_out(turn)
        return turn

    def _make_room(self, turn: Turn) -> None:
        """Preempt entries, the last in the order first, until all others can take their next step."""
        if self._memory.has(self._count_promised()):
            return
        self.on_short()
        found = sorted((entry for entry in self._active.values() if entry.is_plain or entry.can_move), key=_by_order)
        while found and not self._memory.has(self._count_promised()):
            last = found.pop()
            self._send_back(last)
            turn.preempted.append(last.number)

    def _send_back(self, entry: Entry) -> None:
        """Take an entry's blocks, and put it into the queue again."""
        self._leave_steps(entry.number)
        self._memory.release(entry.number)
        entry.num_preemptions += 1
        self.num_preemptions += 1
        self._enqueue(entry)

    def _admit(self, turn: Turn) -> None:
        """Let entries in, strictly in order: whoever is first waits for rows and blocks, and nobody passes."""
        if not self._waiting or turn.preempted:  # what was taken from somebody is not given to somebody else
            return
        rows, promised, is_busy = self.num_rows, self._count_promised(), bool(self._active)
        while self._waiting:
            entry = self._waiting[0]
            # One block more than it needs at once, if others run: or it would be the first to go back.
            needed = self._promise(entry)
            if is_busy and (entry.is_plain or entry.can_move):
                needed += self._use.num_tables
            is_crowded = is_busy and rows + entry.num_rows > self._most_rows
            if is_crowded or rows + entry.num_rows > self.limits.max_rows or not self._memory.has(promised + needed):
                return
            self._waiting.pop(0)
            entry.status = Status.READING if entry.unread else Status.RUNNING  # the latter: it was moved, and goes on
            self._active[entry.number] = self._others[entry.number] = entry
            rows, promised, is_busy = rows + entry.num_rows, promised + needed, True
            turn.admitted.append(entry.number)

    def _share_out(self, turn: Turn) -> None:
        """Give the tokens of a pass that decoding rows leave to those that read, in order.

        A prompt that would fit a pass of its own is not cut because others took part of this one.
        """
        reading = [entry for entry in self._others.values() if entry.status is Status.READING]
        if not reading:
            return
        budget = self._most_tokens
        left = max(1, budget - sum(entry.num_rows for entry in self.find(Status.RUNNING)))
        for entry in sorted(reading, key=_by_order):
            wanted = entry.unread * entry.num_prompts
            is_cut = left < wanted and (entry.is_whole or wanted <= budget)
            if left <= 0 or (turn.reads and (left < entry.num_prompts or is_cut)):
                break
            columns = entry.unread if entry.is_whole else min(entry.unread, max(1, left // entry.num_prompts))
            turn.reads[entry.number] = columns
            left -= columns * entry.num_prompts

    # --- memory is short -------------------------------------------------------------------------------
    def read_less(self, number: int, num_tokens: int) -> bool:
        """There was no memory for a pass of so many of an entry's tokens: whether the next ones can be smaller."""
        entry, self._num_calm = self._entries[number], 0
        if entry.is_whole or num_tokens <= entry.num_prompts:
            return False
        self._most_tokens = max(1, num_tokens // 2)
        return True

    def step_fewer(self, keeps: int | None = None) -> list[int]:
        """There was no memory for a pass: the entries that go back to the queue for it, half of the rows, the last in
        the order first. The first stays, or the one of the number `keeps`; so there may be none."""
        self._num_calm = 0
        order = sorted(self._active.values(), key=_by_order)
        kept = order[0].number if keeps is None and order else keeps
        rows = sum(entry.num_rows for entry in order)
        most, gone = rows // 2, []
        for entry in reversed(order):
            if rows <= most:
                break
            if entry.number != kept and (entry.is_plain or entry.can_move):
                rows -= entry.num_rows
                gone.append(entry.number)
                self._send_back(entry)
        if gone:
            self._most_rows = max(1, rows)
        return gone

    def _grow_again(self) -> None:
        """Let passes be larger once memory has been enough for some time."""
        limits = self.limits
        if self._most_tokens >= limits.tokens_per_pass and self._most_rows >= limits.max_rows:
            return
        self._num_calm += 1
        if self._num_calm >= _TURNS_BEFORE_MORE:
            self._num_calm = 0
            self._most_tokens = min(limits.tokens_per_pass, 2 * self._most_tokens)
            self._most_rows = min(limits.max_rows, 2 * self._most_rows)

    def note_read(self, number: int, columns: int) -> None:
        """Count columns that an entry has read; with the last of them it begins to run."""
        entry = self._entries[number]
        entry.unread -= columns
        assert entry.unread >= 0
        if entry.unread == 0:
            entry.status = Status.RUNNING
            if entry.is_plain:
                del self._others[number]
                self._enter_steps(entry)

    def note_ask(self, number: int, columns: int) -> None:
        """Let an entry that runs read so many columns, under the budget as prompts do."""
        entry = self._entries[number]
        entry.unread = columns
        entry.status = Status.READING

    def note_step(self) -> None:
        """Count a position of every row of the plain entries that run."""
        self._num_steps += 1
        if self._spread:
            spread, self._spread = self._spread, {}
            for entry in spread.values():
                entry.length, entry.is_spread = entry.length + 1, False
                self._enter_steps(entry)

    def set_rows(self, number: int, num_rows: int) -> None:
        """Let rows of a plain entry that runs be gone."""
        entry = self._entries[number]
        entry.num_rows = num_rows
        if number in self._phases:
            phase, before = self._phases[number]
            self._due[phase] += (num_rows - before) * self._use.num_tables
            self._phases[number] = phase, num_rows

    def _enter_steps(self, entry: Entry) -> None:
        if entry.is_spread:
            self._spread[entry.number] = entry
            return
        phase = (self._num_steps - entry.length + self._use.lag) % self._memory.block_size
        self._phases[entry.number] = phase, entry.num_rows
        self._due[phase] += entry.num_rows * self._use.num_tables

    def _leave_steps(self, number: int) -> None:
        self._spread.pop(number, None)
        if number in self._phases:
            phase, num_rows = self._phases.pop(number)
            self._due[phase] -= num_rows * self._use.num_tables

    # --- blocks ------------------------------------------------------------------------------------------
    def _count_blocks(self, entry: Entry) -> int:
        """Blocks for all positions of an entry's rows and one more."""
        num_read = entry.unread if entry.is_whole else min(entry.unread, self.limits.tokens_per_pass)
        return entry.num_rows * self._use.count(entry.length + 1, num_read, self._memory.block_size)

    def _promise(self, entry: Entry) -> int:
        """Blocks that an entry may take without asking again, if it is not plain or does not run."""
        if entry.is_plain:
            return max(entry.moved, self._count_blocks(entry) - entry.held)
        held = entry.held + entry.moved
        left = max(0, entry.reserve - held)
        return entry.moved + (min(left, entry.wanted) if entry.can_move else left)

    def _count_promised(self) -> int:
        total = self._due[self._num_steps % len(self._due)]
        if self._spread:
            total += self._use.num_tables * sum(entry.num_rows for entry in self._spread.values())
        if self._others:
            total += sum(map(self._promise, self._others.values()))
        return total


def _do_nothing() -> None:
    """Nobody has more to say."""


def _by_order(entry: Entry) -> tuple[float, int]:
    return entry.order
