"""The loop of the driving thread: the scheduler decides, passes run, requests get what came of them."""

from __future__ import annotations

import atexit
import threading
import time
import traceback
import weakref
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

import torch

from unspool.decoding.reader import between_passes
from unspool.engine.flights import Landed, PlainRow
from unspool.engine.inbox import Inbox
from unspool.engine.joined import JoinedTask, join_reads
from unspool.engine.looks import take_look
from unspool.engine.mailbox import Usher
from unspool.engine.memory import EngineMemory
from unspool.engine.passes import Passes, PassJob, mark_stream
from unspool.engine.plain import PlainRows
from unspool.engine.prefixes import PrefixIndex
from unspool.engine.request import Request, make_fork_error
from unspool.engine.row_sets import RowSet, RowSets
from unspool.engine.scheduler import Limits, Scheduler, Status, Turn
from unspool.engine.special_tasks import SpecialTasks
from unspool.engine.stats import Counters, EngineStats
from unspool.engine.suspended import count_wanted
from unspool.engine.tasks import PlainTask, SpecialTask, Task
from unspool.errors import EngineError, ResourceError
from unspool.forks import after_fork
from unspool.kernels.by_thread import forget_thread
from unspool.protocols import Model
from unspool.shortage import is_out_of_memory

_IDLE: Final = 0.001  # seconds to wait after a turn that had nothing to do
_driving: weakref.WeakSet[Driver] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """A script may end without closing its engines: a thread in the middle of a pass would abort the process."""
    for driver in list(_driving):
        driver.close()


class Driver:
    """Tasks, the scheduler that orders them, and the thread that does the work."""

    def __init__(self, model: Model, limits: Limits, memory: EngineMemory) -> None:
        self._model, self._memory = model, memory
        memory.on_release = self._release
        self.scheduler = Scheduler(limits, memory, memory.use)
        self._passes = Passes(memory, mixes=model.device.type == "cpu")
        cache = None if memory.pool is None else memory.new_cache()
        keep = None if memory.prefixes is None else partial(_keep_prefix, memory.prefixes)
        self._plain = PlainRows(model, cache, keep)
        self._tasks: dict[int, Task] = {}
        self._specials = SpecialTasks(self.scheduler, memory, self._finish, self._fail, self._join)
        self._sets = RowSets(self._finish, self._begin_again)
        self.scheduler.on_short = self._sets.count_held
        self.counters = Counters()
        self.inbox = Inbox(limits.tokens_per_pass)
        self.death: EngineError | None = None
        self._thread: threading.Thread | None = None
        self._device = model.device
        self._usher = Usher()
        self._short: list[tuple[Task | None, PassJob]] = []  # passes that there was no memory for; None: the rows' step
        self._torn: list[BaseException] = []  # errors that requests ended with in the last turn
        after_fork(self, Driver._leave)
        self._reading: Any = None  # comes when a GPU has read the prompts that were launched in the last turn

    # --- from any thread ---------------------------------------------------------------------------------------
    def submit(self, task: Task) -> None:
        """Put a task into the queue; raises if the queue is full or the engine is closed."""
        with self.inbox.changed:
            if self.death is not None:
                raise self.death
            if self.inbox.is_closing:
                raise EngineError("the engine is closed and takes no more requests; make another")
            waiting, most = self.num_waiting, self.scheduler.limits.max_waiting
            if waiting >= most:
                raise ResourceError(
                    f"{waiting} requests wait already, and the engine's queue has room for {most} (max_waiting); "
                    "submit it again when others are done"
                )
            task.request.attach(self, self._usher)
            self.inbox.put(task)
            if self._thread is None:
                self._thread = threading.Thread(target=self._drive, name="unspool engine", daemon=True)
                self._thread.start()
                _driving.add(self)

    def cancel(self, request: Request) -> None:
        """End a request within a step."""
        self.inbox.cancel(request.number)

    def listen(self) -> None:
        """Hand over each token of those whose readers wait for them."""
        self._plain.listen()

    def _leave(self) -> None:
        """In a forked child: the thread is not there, and in the middle of something for ever."""
        self.inbox.leave()
        self.death, self._thread = make_fork_error(), None

    def close(self) -> None:
        """End all requests, then the thread. Closing twice is fine."""
        with self.inbox.changed:
            self.inbox.is_closing = True
            self.inbox.changed.notify()
            thread = self._thread
        if thread is None:
            self._give_back()
        elif thread is not threading.current_thread():
            thread.join()

    def _give_back(self) -> None:
        """Give all memory back, even where answers, requests or errors are still held."""
        for error in self._torn:
            _clear_frames(error)
        self._torn.clear()
        self._plain.close()
        self._sets.close()
        self._passes.close()
        self._memory.close()
        self._reading = None
        if self._device.type == "cuda":
            forget_thread(threading.get_ident())
            with suppress(Exception):  # a device that has failed must not hold up the close
                torch.cuda.empty_cache()  # what another engine may take is counted by what the device has left

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self.inbox) + self.scheduler.num_waiting

    @property
    def is_closed(self) -> bool:
        """Whether it takes no more requests."""
        return self.inbox.is_closing or self.death is not None

    # --- the thread ----------------------------------------------------------------------------------------------
    def _drive(self) -> None:
        error: BaseException | None = None
        try:
            if self._device.type == "cuda" and self._device.index is not None:
                torch.cuda.set_device(self._device)
            with torch.no_grad():
                while self.inbox.wait(is_busy=bool(self._tasks)):
                    if self._reading is not None and not self._reading.query():
                        self.inbox.gather(self.scheduler.count_unread())
                    num_rows = min(len(self._tasks), self.scheduler.limits.max_rows)  # others wait in the queue
                    with between_passes(self._model, num_rows):
                        self._turn()
        except BaseException as death:
            error = death
        self._end_all(error)
        self._give_back()

    def _end_all(self, error: BaseException | None) -> None:
        """End every request: as cancelled, or with the error that ended the thread."""
        self.inbox.let_in()
        with self.inbox.changed:
            self.inbox.is_closing = True
            if error is not None:
                self.death = EngineError(
                    f"the engine's driving thread ended with {type(error).__name__}: {error}; its requests are lost"
                )
                self.death.__cause__ = error
            tasks = [*self._tasks.values(), *self.inbox.take_all()[0]]
            self._tasks = {task.entry.number: task for task in tasks}
        for task in tasks:
            try:
                self._let_go(task)
                if self.death is None:
                    task.end_rows("cancelled")
            except BaseException:  # whatever state it is in, its readers must not wait
                pass
            finally:
                self.counters.cancelled += self.death is None
                self.counters.failed += self.death is not None
                task.request.finish(self.death)
        self._tasks.clear()
        if error is not None:
            self._torn.append(error)

    # --- a turn --------------------------------------------------------------------------------------------------
    def _turn(self) -> None:
        while self._torn:  # what they passed through is over by now
            _clear_frames(self._torn.pop())
        self._take_in()
        self._memory.begin_turn()
        if self._plain.runs_ahead and self.scheduler.is_short:
            self._note(self._plain.land_all())  # rows that are sent back must know all their tokens
            self._memory.begin_turn()
        turn = self.scheduler.plan(time.monotonic())
        for number in turn.expired:
            self._stop(number, "deadline")
        if turn.reads and self._plain.runs_ahead:
            self.inbox.hold()
        for number in turn.admitted:
            self._open(number)
        self._specials.await_copies()
        self._sets.begin_turns()
        self._sets.await_copies()
        jobs = self._list_jobs(turn) if turn.reads or self._specials else []
        asking = {job: one for one in self._sets if (job := one.make_job()) is not None}
        step = self._plain.ask()
        stepping = None if step is None else PassJob(step)
        asked = list(dict.fromkeys(job for _, job in jobs))  # several requests may read in one
        all_jobs = [*([] if stepping is None else [stepping]), *asked, *asking]
        wanted = sum(count_wanted(job.ask, self._memory.block_size) for job in all_jobs)
        self._memory.make_free(self._memory.use.num_tables * wanted)
        specials = {job: number for number, job in jobs if number in self._specials}
        plain_jobs = [(number, job) for number, job in jobs if number not in self._specials]
        self._passes.run(all_jobs, lambda job: self._take_early(specials, asking, job))
        if self._plain.runs_ahead:
            self._reading = mark_stream() if turn.reads else None
        if stepping is not None and stepping.forward is not None:
            self.scheduler.note_step()
        for number, job in plain_jobs:
            self._take(number, job)
        self._step(stepping)
        for job, number in specials.items():  # some wait for the device: it has the plain rows' tokens to choose
            self._take(number, job)
        self._specials.await_copies()
        self._sets.await_copies()
        self._note(self._plain.land())
        self._make_room()
        self._usher.wake(everybody=self._plain.is_idle)
        if not all_jobs and not turn.admitted and not turn.expired and self._plain.is_idle:
            time.sleep(_IDLE)

    def _take_early(self, specials: dict[PassJob, int], asking: dict[PassJob, RowSet], job: PassJob) -> None:
        """Let sets of rows, and a task that gives way, go on before other passes are run: what they launch comes before
        them, and their copies are there when they are done."""
        row_set, number = asking.get(job), specials.get(job)
        if row_set is not None:
            self._sets.take(row_set, job)
        if number is not None and self._specials.gives_way(number):
            del specials[job]
            self._take(number, job)

    def _take_in(self) -> None:
        """Enter new requests, and end those that were cancelled."""
        incoming, cancelled = self.inbox.take_all()
        is_busy = len(self._tasks) + len(incoming) > 1
        for new in incoming:
            task = new.step_with_others() if is_busy and isinstance(new, SpecialTask) else new
            self._tasks[task.entry.number] = task
            self.scheduler.add(task.entry)
        for number in cancelled:
            self._stop(number, "cancelled")

    def _open(self, number: int) -> None:
        task = self._tasks[number]
        try:
            self._memory.make_free(task.entry.moved)
            if isinstance(task, PlainTask):
                task.open(self._memory)
            else:
                assert isinstance(task, SpecialTask)
                self._specials.open(task)
        except Exception as error:
            self._fail(task, error)

    def _list_jobs(self, turn: Turn) -> list[tuple[int, PassJob]]:
        """What is read beside the plain rows' step."""
        jobs = join_reads((self._tasks.get(number), columns) for number, columns in turn.reads.items())
        read = {number for number, _ in jobs}
        for number, columns in turn.reads.items():
            task = self._tasks.get(number)
            if isinstance(task, PlainTask) and number not in read:
                jobs.append((number, PassJob(task.next_ask(columns), task.is_greedy)))
        return jobs + self._specials.list_jobs(turn.reads)

    def _take(self, number: int, job: PassJob) -> None:
        """Give a task the answer to what it read."""
        task = self._tasks.get(number)
        if task is None:
            return
        try:
            if isinstance(task, PlainTask):
                self._take_plain(task, job)
            elif isinstance(task, SpecialTask):
                tokens = job.ask.tokens
                if job.forward is not None and tokens is not None and tokens.shape[1] > 1:
                    self.counters.prompt_tokens += job.num_tokens
                if job.is_short:
                    self._read_less(task, job)
                    return
                self._specials.take(task, job)
        except Exception as error:
            self._fail(task, error)

    def _take_plain(self, task: PlainTask, job: PassJob) -> None:
        if job.forward is None:
            assert job.error is not None
            if isinstance(task, JoinedTask) and not task.is_alone:
                task.read_alone()  # the error may be another's
                return
            if job.is_short:
                self._read_less(task, job)
                return
            raise job.error
        assert job.ask.tokens is not None
        self.counters.prompt_tokens += task.count_read(job.ask)
        arrival = task.take(job.forward, job.ask, self._memory)
        self.scheduler.note_read(task.entry.number, min(job.ask.tokens.shape[1], task.entry.unread))
        if arrival is not None:
            self._plain.admit(arrival)
        else:
            task.entry.held = task.count_held()

    # --- plain rows ------------------------------------------------------------------------------------------------
    def _step(self, stepping: PassJob | None) -> None:
        """Choose the plain rows' tokens from the pass over them."""
        plain = self._plain
        if stepping is not None and stepping.forward is None:
            assert stepping.error is not None
            self.inbox.let_in()
            self._note(plain.land_all())
            if stepping.is_short:
                self._short.append((None, stepping))
            else:
                self._fail_rows(stepping.error)
            return
        plain.launch(None if stepping is None else stepping.forward)
        self.inbox.let_in()
        if plain.failed:
            failed, plain.failed = plain.failed, {}
            for task, error in failed.items():
                self._fail(task, error)

    def _note(self, landed: list[Landed]) -> None:
        """Hand out the tokens of steps; rows that have ended leave."""
        leaving: list[PlainRow] = []
        ended: list[PlainTask] = []
        for step in landed:
            now, lineup, tokens = time.perf_counter(), step.lineup, step.tokens
            for enter, token in zip(lineup.enter, tokens, strict=True):
                enter(token)
            for places, values in step.reported:
                for at, place in enumerate(places):
                    lineup.rows[place].reported.append((values, at))
            self.counters.note_tokens(len(tokens))
            for place in lineup.find_noted(tokens, step.edges):
                row, token = lineup.rows[place], tokens[place]
                task: PlainTask = row.owner
                if task.quick_ends is None or row.is_done or task.entry.number not in self._tasks:
                    continue
                if token < 0:
                    self._note_task(task, step, [place])
                elif task.note_quick(token, now):
                    leaving.append(row)
                    ended.append(task)
            for task, places in lineup.others.items():
                if task.entry.number in self._tasks:
                    left = [place for place in places if not lineup.rows[place].is_done]
                    leaving += self._note_task(task, step, left) if left else []
                    if not task.rows and task.entry.number in self._tasks:
                        ended.append(task)
        if leaving:
            self._plain.remove(leaving)
        for task in ended:
            self._finish(task)

    def _note_task(self, task: PlainTask, step: Landed, places: list[int]) -> list[PlainRow]:
        """Hand out one step's tokens of a request; the rows that end with them."""
        rows, tokens = [step.lineup.rows[place] for place in places], [step.tokens[place] for place in places]
        try:
            if min(tokens) < 0:
                raise task.explain_no_token(rows[tokens.index(min(tokens))])
            emitted = task.note(rows, tokens)
        except Exception as error:
            self._fail(task, error)
            return []
        task.deliver(emitted)
        ended = [row for row in rows if row.is_done]
        if ended and task.rows:
            self.scheduler.set_rows(task.entry.number, len(task.rows))
        return ended

    # --- memory is short ---------------------------------------------------------------------------------------------
    def _read_less(self, task: Task, job: PassJob) -> None:
        """After a pass that there was no memory for: let the next ones be smaller, or others go first."""
        special = task.special if isinstance(task, SpecialTask) else None
        can_cut = job.ask.tokens is not None and (special is None or special.can_cut)
        if special is not None and can_cut:
            self.scheduler.note_ask(task.entry.number, special.num_columns)
        if not can_cut or not self.scheduler.read_less(task.entry.number, job.num_tokens):
            self._short.append((task, job))
        elif isinstance(task, JoinedTask):
            task.reset()  # states that were written to can't be taken back

    def _make_room(self) -> None:
        """After passes that there was no memory for: send requests back to the queue, the last ones first. If no
        request could go, those whose passes they were end with the error."""
        if not self._short:
            return
        short, self._short = self._short, []
        self._note(self._plain.land_all())  # rows that are sent back must know all their tokens
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        left = [(task, job) for task, job in short if task is None or task.entry.number in self._tasks]
        keeps = next((task.entry.number for task, _ in left if task is not None), None)
        if self.scheduler.step_fewer(keeps):
            return
        for task, job in left:
            assert job.error is not None
            if task is None and len(self._plain) == job.num_rows:
                self._fail_rows(job.error)
            elif isinstance(task, PlainTask):
                self._fail(task, job.error)
            elif isinstance(task, SpecialTask):
                self._take_special(task, job)

    def _fail_rows(self, error: Exception) -> None:
        """End the requests whose rows are stepped with an error."""
        for task in [task for task in self._tasks.values() if isinstance(task, PlainTask)]:
            if task.entry.status is Status.RUNNING:
                self._fail(task, error)

    def _take_special(self, task: SpecialTask, job: PassJob) -> None:
        try:
            self._specials.take(task, job)
        except Exception as error:
            self._fail(task, error)

    # --- tasks end ---------------------------------------------------------------------------------------------------
    def _release(self, number: int) -> None:
        """Take a task's blocks. A plain one will read its text again; what others hold, or is packed, is moved."""
        task = self._tasks[number]
        if isinstance(task, SpecialTask):
            if task in self._sets:
                self._sets.drop(task)
                task.restart(joins=True)
            else:
                self._specials.stop(task)
            return
        assert isinstance(task, PlainTask)
        if self._memory.is_packed:
            task.move_out(self._plain.take_out(task))
        else:
            self._plain.drop(task)
            task.reset()

    def _let_go(self, task: Task) -> None:
        """Give back all that a task holds."""
        if isinstance(task, PlainTask):
            self._plain.drop(task)
            task.close()
        elif isinstance(task, SpecialTask):
            if task in self._sets:
                self._sets.drop(task)
            if task.special is not None:
                task.special.stop()

    def _join(self, task: SpecialTask) -> None:
        """Let the rows of a task whose prompts are read be stepped with those of others."""
        self._sets.admit(task, *task.join(self._memory))

    def _begin_again(self, tasks: Sequence[SpecialTask], error: Exception) -> None:
        """After an error in a turn of several tasks: each begins again, alone."""
        for task in tasks:
            if task.entry.number not in self._tasks:
                continue
            if len(tasks) == 1 and not is_out_of_memory(error):
                self._fail(task, error)
                continue
            try:
                task.restart(joins=False)
                self._specials.open(task)
            except Exception as own_error:
                self._fail(task, own_error)

    def _forget(self, task: Task) -> None:
        self._let_go(task)
        self._tasks.pop(task.entry.number, None)
        self._specials.forget(task.entry.number)
        if task.entry.number in self.scheduler:
            self.scheduler.end(task.entry.number)

    def _finish(self, task: Task) -> None:
        """End a request as it should."""
        self._forget(task)
        self.counters.done += 1
        stats = task.run.stats
        if isinstance(task, SpecialTask):
            self.counters.note_tokens(stats.new_tokens)
        if task.first_at is not None:
            self.counters.note_times(stats, task.run.num_rows)
        task.request.finish()

    def _fail(self, task: Task, error: Exception) -> None:
        """End a request with an error of its own."""
        if task.entry.number in self._tasks:
            self._forget(task)
            if isinstance(task, PlainTask):
                task.hand_over(time.perf_counter())
            self.counters.failed += 1
            self._torn.append(error)
            task.request.finish(error)

    def _stop(self, number: int, reason: str) -> None:
        """End a request before its time, with what it has."""
        task = self._tasks.get(number)
        if task is None:
            return
        if isinstance(task, PlainTask):
            self._note(self._plain.land_all())
            if number not in self._tasks:
                return  # its last token was on its way
        self._forget(task)
        task.end_rows(reason)
        self.counters.cancelled += 1
        task.request.finish()

    # --- what it does ------------------------------------------------------------------------------------------------
    def look(self) -> EngineStats:
        """What it has done and is doing."""
        return take_look(self.counters, self._memory, self.scheduler, self.num_waiting, self._passes.num_passes)


def _clear_frames(error: BaseException) -> None:
    """Let go of what an error has passed through: an error that is kept would keep passes and caches. Lines stay."""
    chain: list[BaseException | None] = [error]
    seen: set[int] = set()
    while chain:
        one = chain.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)
            chain += [one.__cause__, one.__context__]


def _keep_prefix(prefixes: PrefixIndex, row: PlainRow, blocks: list[int], num_held: int) -> None:
    """Let later requests find what a row has read and written, as a chat's next turn does."""
    prefixes.enter(row.tokens[:num_held], blocks, row.names)
