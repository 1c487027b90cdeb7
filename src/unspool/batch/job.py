"""A batch at work: rows flow into the engine, answers into the output, in the order in which they finish."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from unspool.api import LanguageModel
from unspool.batch.answers import Answers, follow, write_failure
from unspool.batch.ledger import Ledger, Progress, Share, describe_job, describe_model
from unspool.batch.lines import BadLineError, Line
from unspool.batch.output import JobOutput, dump_line
from unspool.batch.sources import Source
from unspool.engine import Engine
from unspool.errors import EngineError
from unspool.server.work import Work


class Job:
    """Answers a file's rows with one model."""

    def __init__(
        self,
        lm: LanguageModel,
        engine: Engine,
        source: Source,
        output: JobOutput,
        *,
        name: str,
        settings: Mapping[str, Any] | None = None,
        seed: int = 0,
        share: Share | None = None,
        max_errors: int | None = None,
        any_model: bool = False,
        restarts: bool = False,
    ) -> None:
        self._engine, self._source, self._share = engine, source, share or Share()
        self._answers = Answers(
            lm, engine, name=name, settings=settings, seed=seed, any_model=any_model, created=source.modified
        )
        output.refuse_input(source.path)
        self._ledger = Ledger(output, max_errors)
        self._finished: queue.SimpleQueue[tuple[Line, Work]] = queue.SimpleQueue()
        job = describe_job(
            source, name, settings or {}, seed, self._share, model=describe_model(lm), any_model=any_model
        )
        self.is_resumed = self._ledger.open(job, source.total(self._share), source.bound(), restarts=restarts)

    @property
    def progress(self) -> Progress:
        """How far it is."""
        return self._ledger.progress

    def run(self, report: Callable[[Progress], None] | None = None, stop: Callable[[], bool] | None = None) -> bool:
        """Answer what is not answered yet; whether all is. With `stop`, what runs is finished and no more begun."""
        rows, running, is_open = self._list_rows(), 0, True
        try:
            while is_open or running:
                while is_open and running < self._engine.most_ahead and not (stop is not None and stop()):
                    row = next(rows, None)
                    if row is None:
                        is_open = False
                        break
                    running += self._begin(*row)
                if stop is not None and stop():
                    is_open = False
                if running:
                    running -= self._take_finished()
                if report is not None:
                    report(self.progress)
        finally:
            self._ledger.close()
        return self.progress.done >= self.progress.total

    def _list_rows(self) -> Iterator[tuple[int, Line | BadLineError]]:
        for number, row in self._source.rows(self._share.limit):
            if self._share.has(number) and number not in self._ledger:
                self._source.refuse_changes()
                yield number, row
        self._source.refuse_changes()

    def _begin(self, number: int, row: Line | BadLineError) -> bool:
        """Submit a row; whether it is at work now."""
        if isinstance(row, BadLineError):
            self._ledger.fail(number, dump_line(write_failure(number, None, row)))
            return False
        try:
            work = self._answers.begin(row)
        except EngineError:
            raise
        except Exception as error:
            self._ledger.fail(number, dump_line(write_failure(number, row, error)))
            return False
        follow(work, partial(self._finished.put, (row, work)))
        return True

    def _take_finished(self) -> int:
        """Write what has finished, and wait for one that has; how many there were."""
        found = 0
        try:
            line, work = self._finished.get(timeout=0.5)
            while True:
                found += 1
                self._write(line, work)
                line, work = self._finished.get_nowait()
        except queue.Empty:
            return found

    def _write(self, line: Line, work: Work) -> None:
        try:
            choices = self._answers.wait(work)
        except EngineError:
            raise
        except Exception as error:
            self._ledger.fail(line.number, dump_line(write_failure(line.number, line, error)))
            return
        self._ledger.answer(line.number, dump_line(self._answers.write(line, work, choices)), work.num_new)
