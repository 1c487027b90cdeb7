"""What a job has done: its answers and errors as they are written, and how far it is."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from unspool.api import LanguageModel
from unspool.batch.output import JobOutput
from unspool.batch.sources import Source
from unspool.errors import SettingError, UnspoolError


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
        return number % self.count == self.index % self.count and (self.limit is None or number <= self.limit)

    def count_to(self, last: int) -> int:
        """How many of the rows from 1 to `last` are of this share."""
        last = last if self.limit is None else min(last, self.limit)
        return max(0, (last - self.index) // self.count + 1)


_NO_FILES: Final = dict.fromkeys(("weights", "device", "dtype", "quantize", "native", "defaults"))


def describe_model(lm: LanguageModel) -> dict[str, Any]:
    """What the answers of a model depend on; a model that was not loaded from files is known by its sample."""
    model = lm.model
    origin: Any = getattr(model, "origin", None)
    if origin is None:
        return {**_NO_FILES, "weights": getattr(model, "fingerprint", None)}
    found: dict[str, Any] = origin.describe(model.device, model.dtype, lm.generation_config)
    return found


def describe_job(
    source: Source,
    name: str,
    settings: Mapping[str, Any],
    seed: int,
    share: Share,
    *,
    model: Mapping[str, Any] | None = None,
    any_model: bool = False,
) -> dict[str, Any]:
    """What the answers of a job depend on, and which rows there are; `model` is what `describe_model` says."""
    return {
        "input": source.fingerprint(),
        "columns": source.names,
        "model": name,
        "seed": seed,
        "settings": {name: repr(value) for name, value in sorted(settings.items())},
        "share": f"{share.index}/{share.count}",
        "any_model": any_model,
        **(model or _NO_FILES),
    }


class Ledger:
    """The output of a job: each row once, however many answer it and how often."""

    def __init__(self, output: JobOutput, max_errors: int | None = None) -> None:
        if max_errors is not None and max_errors < 0:
            raise SettingError(f"`max_errors` is at least 0, not {max_errors}")
        self._output, self._max_errors = output, max_errors
        self.progress = Progress(0)

    def open(self, job: dict[str, Any], total: int, last: int, *, restarts: bool = False) -> bool:
        """Begin a job of `total` rows, numbered up to `last`, or go on with it; whether something was there."""
        is_resumed = self._output.open(job, last=last, restarts=restarts)
        done = self._output.done.count
        self.progress = Progress(total, done, self._output.errors.count, num_before=done)
        return is_resumed

    def __contains__(self, number: int) -> bool:
        return number in self._output.done

    def answer(self, number: int, line: bytes, num_tokens: int) -> None:
        """Write a row's answer."""
        self._output.answers.write_line(line)
        self.progress.num_tokens += num_tokens
        self._note_done(number)

    def fail(self, number: int, line: bytes) -> None:
        """Write why a row failed; raises if too many have."""
        self._output.errors.write_line(line)
        self.progress.failed += 1
        self._note_done(number)
        if self._max_errors is not None and self.progress.failed > self._max_errors:
            raise BatchFailedError(
                f"{self.progress.failed} rows failed, and at most {self._max_errors} may: "
                f"{self._output.errors.path} says why. The last one, line {number}: "
                f"{json.loads(line)['error']['message']}"
            )

    def _note_done(self, number: int) -> None:
        self._output.done.add(number)
        self.progress.done += 1

    def close(self) -> None:
        """Sync and close the files."""
        self._output.close()
