"""Where rows come from: .jsonl files, and parquet or arrow files by their columns, read as they are needed."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from unspool.batch.lines import MAX_LINE_BYTES, BadLineError, Line, parse_line, read_row
from unspool.errors import InputError, MissingExtraError

_EDGE: Final = 1 << 20  # bytes at both ends of a file, by which it is known again
_CHUNK: Final = 1 << 20
_ROWS: Final = 256  # that are taken out of a parquet file at once


class Source(ABC):
    """A file of rows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise InputError(f"{path} is not a file; give a .jsonl, .parquet or .arrow file with a request per line")

    @property
    def modified(self) -> int:
        """When the file was changed, in seconds; answers are dated by it, so that they are the same every time."""
        return int(self.path.stat().st_mtime)

    def fingerprint(self) -> str:
        """A digest of the file's size and its ends."""
        size = self.path.stat().st_size
        digest = hashlib.sha256(str(size).encode())
        with self.path.open("rb") as file:
            digest.update(file.read(_EDGE))
            file.seek(max(0, size - _EDGE))
            digest.update(file.read(_EDGE))
        return digest.hexdigest()

    @abstractmethod
    def count(self) -> int:
        """How many rows there are."""

    @abstractmethod
    def rows(self) -> Iterator[tuple[int, Line | BadLineError]]:
        """Every row with its number, from 1; empty lines are left out."""


class JsonLines(Source):
    """A request per line."""

    def count(self) -> int:
        """How many lines there are, empty ones included."""
        number, last = 0, b"\n"
        with self.path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                number += chunk.count(b"\n")
                last = chunk[-1:]
        return number + (last != b"\n")

    def rows(self) -> Iterator[tuple[int, Line | BadLineError]]:
        with self.path.open("rb") as file:
            number = 0
            while text := file.readline(MAX_LINE_BYTES + 2):
                number += 1
                is_long = len(text) > MAX_LINE_BYTES
                while is_long and not text.endswith(b"\n") and (text := file.readline(_CHUNK)):
                    pass  # the rest of a line that is too long
                if is_long:
                    yield number, BadLineError(f"the line has more than {MAX_LINE_BYTES} bytes")
                elif text.strip():
                    yield number, _try_line(number, text)


def _try_line(number: int, text: bytes) -> Line | BadLineError:
    try:
        return parse_line(number, text)
    except BadLineError as error:
        return error


class Columns(Source):
    """A parquet or arrow file; columns are named, and those that are not are settings of their rows."""

    def __init__(self, path: Path, names: Mapping[str, str]) -> None:
        """`names` are the file's names of `prompt`, `messages` and `id`."""
        super().__init__(path)
        self._names = {column: name for name, column in names.items()}
        try:
            import pyarrow  # noqa: F401
        except ImportError as error:
            raise MissingExtraError("pyarrow", "batch", f"reading {path.suffix} files") from error
        with _open_table(path) as (columns, _, _):
            known = {self._names.get(column, column) for column in columns}
        if not known & {"prompt", "messages"}:
            raise InputError(
                f"{path} has the columns {', '.join(columns)[:400]} and none for prompts; name it with --prompt-column "
                "or --messages-column"
            )

    def count(self) -> int:
        """How many rows there are."""
        with _open_table(self.path) as (_, number, _):
            return int(number)

    def rows(self) -> Iterator[tuple[int, Line | BadLineError]]:
        number = 0
        with _open_table(self.path) as (_, _, parts):
            for part in parts:
                for row in part.to_pylist():
                    number += 1
                    named = {self._names.get(name, name): value for name, value in row.items() if value is not None}
                    yield number, _try_row(number, named)


@contextmanager
def _open_table(path: Path) -> Iterator[tuple[list[str], int, Iterator[Any]]]:
    """The columns of a parquet or arrow file, how many rows it has, and those rows a part at a time."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        if path.suffix == ".parquet":
            with pq.ParquetFile(path) as file:
                yield file.schema_arrow.names, file.metadata.num_rows, file.iter_batches(_ROWS)
        else:
            with pa.memory_map(str(path)) as memory, pa.ipc.open_file(memory) as file:
                places = range(file.num_record_batches)
                counted = sum(file.get_batch(place).num_rows for place in places)
                yield file.schema.names, counted, map(file.get_batch, places)
    except pa.ArrowException as error:
        raise InputError(f"{path} can't be read: {error}") from error


def _try_row(number: int, row: dict[str, Any]) -> Line | BadLineError:
    try:
        json.dumps(row, allow_nan=False)
        return read_row(number, row)
    except BadLineError as error:
        return error
    except (TypeError, ValueError) as error:
        return BadLineError(f"a column holds what JSON has no form for: {error}")


def open_source(path: Path | str, names: Mapping[str, str] | None = None) -> Source:
    """The rows of a file, by its name."""
    place = Path(path)
    if place.suffix in (".parquet", ".arrow", ".feather"):
        return Columns(place, names or {})
    if names:
        raise InputError("columns are named for .parquet and .arrow files; the lines of a .jsonl file name their own")
    return JsonLines(place)
