"""Special tasks that were admitted: what each waits for, and its way from one ask to the next."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from unspool.engine.memory import EngineMemory
from unspool.engine.passes import PassJob
from unspool.engine.scheduler import Scheduler, Status
from unspool.engine.tasks import SpecialTask

_SMALL: Final = 64  # tokens of an ask that joins the next pass whatever else there is


class SpecialTasks:
    """The special tasks at work."""

    def __init__(
        self,
        scheduler: Scheduler,
        memory: EngineMemory,
        on_end: Callable[[SpecialTask], None],
        on_error: Callable[[SpecialTask, Exception], None],
        on_read: Callable[[SpecialTask], None],
    ) -> None:
        """`on_read` is called with a task whose prompts are read and whose steps are not its own."""
        self._scheduler, self._memory, self._on_end, self._on_error = scheduler, memory, on_end, on_error
        self._on_read = on_read
        self._tasks: dict[int, SpecialTask] = {}
        self._awaited: list[SpecialTask] = []  # those that wait for copies from the device
        self._giving_way: set[int] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def __contains__(self, number: int) -> bool:
        return number in self._tasks

    def open(self, task: SpecialTask) -> None:
        """Begin a task, or go on with one that was stopped."""
        self._tasks[task.entry.number] = task
        task.open(self._memory)
        self._follow(task)

    def stop(self, task: SpecialTask) -> None:
        """Let others have a task's blocks; it goes on when it is opened again."""
        self.forget(task.entry.number)
        task.move_out()

    def forget(self, number: int) -> None:
        """A task has ended, or is stopped."""
        self._tasks.pop(number, None)
        self._giving_way.discard(number)

    def list_jobs(self, reads: Mapping[int, int]) -> list[tuple[int, PassJob]]:
        """What they ask: those that run all of it, those that read so many columns."""
        jobs = []
        for number, task in self._tasks.items():
            special = task.special
            assert special is not None
            if task.entry.status is Status.RUNNING:
                jobs.append((number, PassJob(special.next_ask(special.num_columns))))
            elif number in reads:
                jobs.append(
                    (number, PassJob(special.next_ask(reads[number] if special.can_cut else special.num_columns)))
                )
        return jobs

    def gives_way(self, number: int) -> bool:
        """Whether a task's last turn ended where it waits for a copy: it did not hold up the thread meanwhile."""
        return number in self._giving_way

    def take(self, task: SpecialTask, job: PassJob) -> None:
        """Give a task the answer to what it asked, or the error."""
        special = task.special
        assert special is not None
        if job.forward is None:
            assert job.error is not None
            special.throw(job.error)
        else:
            task.enter_prompts(self._memory)
            special.take(job.forward, job.ask)
        if special.waits:
            self._giving_way.add(task.entry.number)
        else:
            self._giving_way.discard(task.entry.number)
        self._follow(task)

    def _follow(self, task: SpecialTask) -> None:
        """See what a task waits for now, if it has not ended."""
        special, entry = task.special, task.entry
        assert special is not None
        if special.waits:
            self._awaited.append(task)
            return
        if special.is_done:
            if special.turns is None:
                self._on_end(task)
            else:
                self.forget(entry.number)
                self._on_read(task)
            return
        entry.held = special.count_held()
        entry.wanted = self._memory.use.num_tables * special.count_wanted(self._memory.block_size)
        entry.num_prompts = special.num_rows
        if special.num_columns * special.num_rows > min(_SMALL, self._scheduler.most_tokens):
            self._scheduler.note_ask(entry.number, special.num_columns)
        else:
            entry.unread, entry.status = 0, Status.RUNNING

    def await_copies(self) -> None:
        """Let tasks go on that wait for copies, until all of them ask again: by the time the first one's copy is there,
        all have launched what they need."""
        while self._awaited:
            awaited, self._awaited = self._awaited, []
            for task in awaited:
                special = task.special
                if special is None or not special.waits:  # it was ended
                    continue
                try:
                    special.go_on()
                    self._follow(task)
                except Exception as error:
                    self._on_error(task, error)
