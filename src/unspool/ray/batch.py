"""A file of prompts on a cluster: parts of it are read, answered and written by many actors."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from unspool.api import LanguageModel
from unspool.batch.answers import find_name, write_failure
from unspool.batch.ledger import Ledger, Progress, Share, describe_job, describe_model
from unspool.batch.lines import BadLineError, Line
from unspool.batch.output import Done, JobOutput, dump_line
from unspool.batch.sources import Source, try_line
from unspool.errors import EngineError, UnspoolError, excerpt
from unspool.loading.model import describe_files
from unspool.ray.cluster import Actors, import_ray
from unspool.ray.dataset import map_batches
from unspool.ray.requests import Requests
from unspool.ray.worker import Answered, Worker, locate

ROWS_PER_TASK: Final = 64
_SCHEMA: Final = pa.schema(
    [("line", pa.int64()), ("answer", pa.binary()), ("failed", pa.bool_()), ("num_tokens", pa.int64())]
)


class LineWorker(Worker):
    """Answers rows of `Requests` with the lines that `unspool batch` writes."""

    def __call__(self, batch: pa.Table) -> Iterator[pa.Table]:
        """Tables of lines, in the order of the rows."""
        for done in self.answer(_list_rows(batch)):
            yield pa.Table.from_pylist(list(map(self._write, done)), _SCHEMA)

    def _write(self, done: Answered) -> dict[str, Any]:
        if done.error is None and done.line is not None and done.work is not None and done.choices is not None:
            made, tokens = self.answers.write(done.line, done.work, done.choices), done.work.num_new
        else:
            made, tokens = write_failure(done.number, done.line, done.error or EngineError("no answer")), 0
        return {"line": done.number, "answer": dump_line(made), "failed": done.choices is None, "num_tokens": tokens}


def _list_rows(batch: pa.Table) -> Iterator[tuple[int, Line | BadLineError]]:
    for row in batch.to_pylist():
        number, text = row["line"], row["text"]
        yield number, BadLineError(row["problem"]) if text is None else try_line(number, text)


@dataclass(frozen=True)
class RayPipeline:
    """What is to be answered and by whom: from a file's rows to lines of answers."""

    model: Any
    source: Source
    actors: Actors = field(default_factory=Actors)
    name: str = ""  # that answers carry
    settings: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    share: Share = field(default_factory=Share)
    any_model: bool = False
    load: Mapping[str, Any] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)
    rows_per_task: int = ROWS_PER_TASK

    def describe(self) -> dict[str, Any]:
        """What the answers depend on. The model's files are looked at where an actor would be: it may be here or not.

        A function that returns a model is not called for that, so that its weights are not known again.
        """
        model = None
        if isinstance(self.model, LanguageModel):
            model = describe_model(self.model)
        elif isinstance(self.model, str | Path):
            ray = import_ray("--ray")
            look = ray.remote(describe_files).options(**self.actors.find_resources(ray))
            try:
                model = ray.get(look.remote(locate(self.model), **self.load))
            except Exception as error:
                raise read_failure(error) from error
        return describe_job(
            self.source,
            self._find_name(),
            self.settings,
            self.seed,
            self.share,
            model=model,
            any_model=self.any_model,
        )

    def _find_name(self) -> str:
        return self.name or find_name(str(self.model))

    def count(self) -> int:
        """Rows of this job."""
        return self.source.total(self.share)

    def build(self, done: Done, weights: str | None = None) -> Any:
        """The dataset of answers to rows that are not done; actors that find other `weights` refuse to work."""
        self.source.refuse_changes()
        ray = import_ray("--ray")
        logging.getLogger("ray.data").setLevel(logging.WARNING)
        requests = Requests(self.source, self.share, done, self.rows_per_task)
        rows = ray.data.read_datasource(requests, override_num_blocks=max(1, len(requests)))
        rows.context.enable_progress_bars = False
        rows.context.verbose_progress = False
        if requests.most_rows > 2 * self.rows_per_task:
            rows = rows.repartition(target_num_rows_per_block=self.rows_per_task)
        options = {
            "name": self._find_name(),
            "seed": self.seed,
            "settings": dict(self.settings),
            "load": dict(self.load),
            "engine": dict(self.engine),
            "any_model": self.any_model,
            "created": self.source.modified,
            "weights": weights,
        }
        return map_batches(rows, LineWorker, self.actors, self.rows_per_task, locate(self.model), options)


class RayJob:
    """Answers a file's rows by actors; its output, and how it goes on, are those of `unspool.batch.job.Job`."""

    def __init__(
        self, pipeline: RayPipeline, output: JobOutput, *, max_errors: int | None = None, restarts: bool = False
    ) -> None:
        self._pipeline, self._output = pipeline, output
        output.refuse_input(pipeline.source.path)
        self._ledger = Ledger(output, max_errors)
        job = pipeline.describe()
        self._weights = job["weights"]
        self.is_resumed = self._ledger.open(job, pipeline.count(), pipeline.source.bound(), restarts=restarts)

    @property
    def progress(self) -> Progress:
        """How far it is."""
        return self._ledger.progress

    def run(self, report: Callable[[Progress], None] | None = None, stop: Callable[[], bool] | None = None) -> bool:
        """Answer what is not answered yet; whether all is. With `stop`, it ends at once: the next run goes on."""
        try:
            if self.progress.done < self.progress.total:
                dataset = self._pipeline.build(self._output.done, self._weights)
                for table in dataset.iter_batches(batch_size=None, batch_format="pyarrow"):
                    self._write(table)
                    if report is not None:
                        report(self.progress)
                    if stop is not None and stop():
                        break
        except UnspoolError:
            raise
        except Exception as error:  # Ray's, and those of the packages that it moves rows by
            raise read_failure(error) from error
        finally:
            self._ledger.close()
        return self.progress.done >= self.progress.total

    def _write(self, table: pa.Table) -> None:
        for row in table.to_pylist():
            number = row["line"]
            if number in self._ledger:  # a task that ran twice
                continue
            if row["failed"]:
                self._ledger.fail(number, row["answer"])
            else:
                self._ledger.answer(number, row["answer"], row["num_tokens"])


def read_failure(error: Exception) -> UnspoolError:
    """What ended a job on a cluster, in few words."""
    cause: Any = error
    while getattr(cause, "cause", None) is not None:
        cause = cause.cause
    if isinstance(cause, UnspoolError) and not isinstance(cause, EngineError):
        return cause
    lines = str(cause).strip().splitlines() or [type(error).__name__]
    return EngineError(f"Ray has ended the job: {excerpt(lines[-1], 500)}. What is written stays; start it again")
