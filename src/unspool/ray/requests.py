"""A file of requests as a dataset: every worker reads its own part of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pyarrow as pa
from ray.data import Datasource
from ray.data.block import BlockMetadata
from ray.data.datasource import ReadTask

from unspool.batch.ledger import Share
from unspool.batch.lines import BadLineError
from unspool.batch.output import Done
from unspool.batch.sources import Part, Source

SCHEMA = pa.schema([("line", pa.int64()), ("text", pa.binary()), ("problem", pa.string())])
_MOST_PARTS = 20_000  # of a file: each is a task


class Requests(Datasource):  # type: ignore[misc]  # Ray is not read
    """The rows of a file that are a job's and not done: their numbers, and their JSON text or what is wrong."""

    def __init__(self, source: Source, share: Share, done: Done, num_rows: int) -> None:
        """A part has about `num_rows` rows, or more if there would be too many parts."""
        super().__init__()
        self._source, self._share = source, share
        parts = source.list_parts(num_rows)
        if len(parts) > _MOST_PARTS:
            parts = parts[:: -(-len(parts) // _MOST_PARTS)]
        ends = [*(part.first for part in parts[1:]), 1 << 62]
        self._parts = [
            (part, end, done.cut(part.first, end))
            for part, end in zip(parts, ends, strict=True)
            if share.limit is None or part.first <= share.limit
        ]
        self.most_rows = max((end - part.first for part, end, _ in self._parts[:-1]), default=num_rows)

    def __len__(self) -> int:
        return len(self._parts)

    def estimate_inmemory_data_size(self) -> int | None:
        """Bytes of the file."""
        return self._source.path.stat().st_size

    def get_read_tasks(
        self,
        parallelism: int,  # noqa: ARG002 - a part is a task, however many there are to be
        per_task_row_limit: int | None = None,
        data_context: Any = None,  # noqa: ARG002 - Ray's own settings
    ) -> list[ReadTask]:
        """A task for every part."""
        size = -(-self._source.path.stat().st_size // max(1, len(self._parts)))
        about = BlockMetadata(num_rows=None, size_bytes=size, input_files=None, exec_stats=None)
        return [
            ReadTask(
                partial(_read, self._source, part, end, self._share.has, done),
                about,
                schema=SCHEMA,
                per_task_row_limit=per_task_row_limit,
            )
            for part, end, done in self._parts
        ]


def _read(source: Source, part: Part, end: int, has: Callable[[int], bool], done: Done) -> Iterator[pa.Table]:
    rows = []
    for number, raw in source.raw_rows(part):
        if number >= end:
            break
        if has(number) and number not in done:
            is_bad = isinstance(raw, BadLineError)
            rows.append({"line": number, "text": None if is_bad else raw, "problem": str(raw) if is_bad else None})
            if len(rows) == 1024:
                yield pa.Table.from_pylist(rows, SCHEMA)
                rows = []
    yield pa.Table.from_pylist(rows, SCHEMA)
