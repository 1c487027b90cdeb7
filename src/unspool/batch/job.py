"""A batch at work: rows flow into the engine, answers into the output, in the order in which they finish."""

from __future__ import annotations

import hashlib
import queue
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unspool.api import LanguageModel
from unspool.batch.lines import CHAT, COMPLETIONS, RESPONSES, BadLineError, Line
from unspool.batch.output import Output
from unspool.batch.sources import Source
from unspool.decoding.randomness import derive_seed
from unspool.engine import Engine
from unspool.errors import EngineError, SettingError, UnspoolError
from unspool.server.chat import ChatDialect
from unspool.server.completions import CompletionDialect
from unspool.server.dialect import Dialect, Reply
from unspool.server.fields import FieldTable
from unspool.server.names import CHAT as CHAT_FIELDS
from unspool.server.names import COMPLETIONS as COMPLETION_FIELDS
from unspool.server.names import RESPONSES as RESPONSE_FIELDS
from unspool.server.options import Limits
from unspool.server.orders import Order, Target
from unspool.server.refusals import RequestError, read_error
from unspool.server.responses import ResponseDialect
from unspool.server.tokens import TokenTexts
from unspool.server.usage import count_usage
from unspool.server.work import Choice, Work

_LIMITS = Limits(new_tokens=1 << 20, choices=1024, request_seconds=1e9, top_logprobs=64)
_DIALECTS: dict[str, tuple[Dialect, FieldTable]] = {
    CHAT: (ChatDialect(), CHAT_FIELDS),
    COMPLETIONS: (CompletionDialect(), COMPLETION_FIELDS),
    RESPONSES: (ResponseDialect(), RESPONSE_FIELDS),
}


@dataclass
class Progress:
    """How far a job is."""

    total: int  # rows of this job
    done: int = 0  # with those of earlier runs
    failed: int = 0
    num_tokens: int = 0  # written by this run
    started: float = field(default_factory=time.monotonic)
    num_before: int = 0  # rows that earlier runs did

    @property
    def seconds(self) -> float:
        """That this run has taken."""
        return time.monotonic() - self.started

    @property
    def rate(self) -> float:
        """Rows a second."""
        return (self.done - self.num_before) / max(self.seconds, 1e-9)

    @property
    def seconds_left(self) -> float | None:
        """That the rest will take at this rate."""
        return (self.total - self.done) / self.rate if self.done > self.num_before else None


class BatchFailedError(UnspoolError):
    """More rows failed than were allowed."""


@dataclass(frozen=True)
class Share:
    """The rows of a file that are this job's: all, or those of one of several machines."""

    index: int = 1
    count: int = 1
    limit: int | None = None  # rows of the file, from its beginning

    def __post_init__(self) -> None:
        if not 1 <= self.index <= self.count <= 1_000_000:
            raise SettingError(f"a share is I/N with I from 1 to N, not {self.index}/{self.count}")
        if self.limit is not None and self.limit < 1:
            raise SettingError(f"--limit is at least 1, not {self.limit}")

    def has(self, number: int) -> bool:
        """Whether a row is of this share."""
        return number % self.count == self.index % self.count

    def measure(self, num_rows: int) -> int:
        """How many of so many rows are of this share."""
        rows = num_rows if self.limit is None else min(num_rows, self.limit)
        return (rows - self.index) // self.count + 1 if rows >= self.index else 0


class Job:
    """Answers a file's rows with one model."""

    def __init__(
        self,
        lm: LanguageModel,
        engine: Engine,
        source: Source,
        output: Output,
        *,
        name: str,
        settings: Mapping[str, Any] | None = None,
        seed: int = 0,
        share: Share | None = None,
        max_errors: int | None = None,
        any_model: bool = False,
        restarts: bool = False,
    ) -> None:
        self._engine, self._source, self._output = engine, source, output
        self._settings, self._seed, self._share = dict(settings or {}), seed, share or Share()
        self._max_errors, self._any_model = max_errors, any_model
        self._target = Target(name, lm, _LIMITS)
        self._texts = TokenTexts(lm.tokenizer)
        self._finished: queue.SimpleQueue[tuple[Line, Work]] = queue.SimpleQueue()
        self.is_resumed = output.open(self._describe(), restarts=restarts)
        self.progress = Progress(self._share.measure(source.count()), output.done.count, output.errors.count)
        self.progress.num_before = self.progress.done

    def _describe(self) -> dict[str, Any]:
        """What an answer depends on, and which rows there are."""
        return {
            "input": self._source.fingerprint(),
            "model": self._target.name,
            "seed": self._seed,
            "settings": {name: repr(value) for name, value in sorted(self._settings.items())},
            "share": f"{self._share.index}/{self._share.count}",
        }

    def run(self, tell: Callable[[Progress], None] | None = None, stop: Callable[[], bool] | None = None) -> bool:
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
                if tell is not None:
                    tell(self.progress)
        finally:
            self._output.close()
        return self.progress.done >= self.progress.total

    def _list_rows(self) -> Iterator[tuple[int, Line | BadLineError]]:
        for number, row in self._source.rows():
            if self._share.limit is not None and number > self._share.limit:
                return
            if self._share.has(number) and number not in self._output.done:
                yield number, row

    def _begin(self, number: int, row: Line | BadLineError) -> bool:
        """Submit a row; whether it is at work now."""
        if isinstance(row, BadLineError):
            self._fail(number, None, row)
            return False
        try:
            order = self._read(row)
            work = Work(self._engine, order, self._target.lm.tokenizer)
        except Exception as error:
            if isinstance(error.__cause__, EngineError):  # no row's fault: it is answered by the next run
                raise error.__cause__ from None
            self._fail(number, row, read_error(error) if isinstance(error, UnspoolError) else error)
            return False
        self._follow(row, work)
        return True

    def _follow(self, line: Line, work: Work, place: int = 0) -> None:
        """Note a work as finished once its last request is, one request after the other."""
        if place == len(work.requests):
            self._finished.put((line, work))
        else:
            work.requests[place].when_done(lambda _: self._follow(line, work, place + 1))

    def _read(self, line: Line) -> Order:
        dialect, table = _DIALECTS[line.url]
        body = dict(line.body)
        asked = body.pop("model", None)
        if asked is not None and asked != self._target.name and not self._any_model:
            raise BadLineError(
                f"the line asks for the model {asked!r:.80} and this job runs {self._target.name!r}; use --any-model"
            )
        if body.get("stream"):
            raise BadLineError("`stream` has no meaning in a file; leave it out")
        taken = {table[name].target for name, value in body.items() if name in table and value is not None}
        body |= {name: value for name, value in self._settings.items() if name not in taken}
        if "seed" not in taken:
            body["seed"] = derive_seed(self._seed, line.number) % 2**31
        order = dialect.read(body, self._target)
        digest = hashlib.sha256(f"{line.number}\0{line.custom_id}".encode()).hexdigest()
        order.id, order.created = f"{order.id.partition('-')[0]}-{digest[:24]}", self._source.modified
        return order

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
            choices = work.wait()
        except EngineError:
            raise
        except Exception as error:
            self._fail(line.number, line, read_error(error, work.order.names, is_submitted=True))
            return
        self.progress.num_tokens += work.num_new
        made = _write_plain(line, choices, work) if line.is_plain else self._write_openai(line, choices, work)
        self._output.answers.write(made)
        self._note_done(line.number)

    def _write_openai(self, line: Line, choices: list[Choice], work: Work) -> dict[str, Any]:
        order = work.order
        body = _DIALECTS[line.url][0].write(Reply(order, self._texts, "unspool"), choices, work)
        return {
            "id": f"batch_req_{order.id.partition('-')[2]}",
            "custom_id": line.custom_id,
            "line": line.number,
            "response": {"status_code": 200, "request_id": order.id, "body": body},
            "error": None,
        }

    def _fail(self, number: int, line: Line | None, error: Exception) -> None:
        told = error.as_openai()["error"] if isinstance(error, RequestError) else {"message": str(error)}
        made: dict[str, Any] = {"line": number, "custom_id": None if line is None else line.custom_id, "error": told}
        self._output.errors.write(made)
        self.progress.failed += 1
        self._note_done(number)
        if self._max_errors is not None and self.progress.failed > self._max_errors:
            raise BatchFailedError(
                f"{self.progress.failed} rows failed, and --max-errors is {self._max_errors}: "
                f"{self._output.errors.path} says why. The last one, line {number}: {told['message']}"
            )

    def _note_done(self, number: int) -> None:
        self._output.done.add(number)
        self.progress.done += 1


def _write_plain(line: Line, choices: list[Choice], work: Work) -> dict[str, Any]:
    """An answer in our own form: the text, why it ended, and what it cost."""
    made: dict[str, Any] = {"line": line.number}
    if line.custom_id is not None:
        made["id"] = line.custom_id
    if len(choices) == 1:
        made |= {"text": choices[0].text, "finish_reason": choices[0].finish_reason}
        if choices[0].calls:
            made["tool_calls"] = [call.as_openai() for call in choices[0].calls]
    else:
        made["texts"] = [choice.text for choice in choices]
        made["finish_reasons"] = [choice.finish_reason for choice in choices]
    if work.order.logprobs is not None:
        made["logprobs"] = [
            [[told.token_id, round(told.logprob, 6)] for told in choice.logprobs or []] for choice in choices
        ]
    return {**made, "usage": count_usage(work)}


def find_name(model: str) -> str:
    """The name of a model that answers carry: a path's last part."""
    return Path(model).name or model
