"""Where rows come from: .jsonl files, and parquet or arrow files by their columns, read as they are needed."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NamedTuple

from unspool.batch.lines import MAX_LINE_BYTES, BadLineError, Line, parse_line
from unspool.errors import InputError, MissingExtraError

_EDGE: Final = 1 << 20  # bytes at both ends of a file, by which it is known again
_CHUNK: Final = 1 << 20
_ROWS: Final = 256  # that are taken out of a parquet file at once


class Part(NamedTuple):
    """Rows of a file that can be read by themselves."""

    first: int  # the number of the first row, from 1
    place: int  # where they begin: a byte of a .jsonl file, a group of rows or a batch of other files


_WHOLE: Final = Part(1, 0)


class Source(ABC):
    """A file of rows."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()  # workers have folders of their own
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
    def count(self, has: Callable[[int], bool]) -> int:
        """How many rows there are among those whose numbers `has` accepts."""

    @abstractmethod
    def list_parts(self, num_rows: int) -> list[Part]:
        """The file as parts of about so many rows, from its beginning to its end."""

    @abstractmethod
    def raw_rows(self, part: Part = _WHOLE) -> Iterator[tuple[int, bytes | BadLineError]]:
        """Every row from a part's beginning on, as JSON text with its number, from 1; empty lines are left out."""

    def rows(self, limit: int | None = None) -> Iterator[tuple[int, Line | BadLineError]]:
        """Every row with its number, of the first `limit` ones."""
        for number, raw in self.raw_rows():
            if limit is not None and number > limit:
                return
            yield number, raw if isinstance(raw, BadLineError) else try_line(number, raw)


class JsonLines(Source):
    """A request per line."""

    def count(self, has: Callable[[int], bool]) -> int:
        """How many lines there are that are not empty."""
        return sum(has(number) for number, _ in self.raw_rows())

    def list_parts(self, num_rows: int) -> list[Part]:
        """Beginnings of lines."""
        parts, number, place = [_WHOLE], 0, 0
        with self.path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                found = -1
                while (found := chunk.find(b"\n", found + 1)) >= 0:
                    number += 1
                    if number % num_rows == 0:
                        parts.append(Part(number + 1, place + found + 1))
                place += len(chunk)
        return parts

    def raw_rows(self, part: Part = _WHOLE) -> Iterator[tuple[int, bytes | BadLineError]]:
        with self.path.open("rb") as file:
            file.seek(part.place)
            number = part.first - 1
            while text := file.readline(MAX_LINE_BYTES + 2):
                number += 1
                is_long = len(text) > MAX_LINE_BYTES
                while is_long and not text.endswith(b"\n") and (text := file.readline(_CHUNK)):
                    pass  # the rest of a line that is too long
                if is_long:
                    yield number, BadLineError(f"the line has more than {MAX_LINE_BYTES} bytes")
                elif not text.isspace():
                    yield number, text


def try_line(number: int, text: bytes) -> Line | BadLineError:
    """The request of a line, or why there is none."""
    try:
        return parse_line(number, text)
    except BadLineError as error:
        return error


class ColumnFile(Source):
    """A parquet or arrow file; columns are named, and those that are not are settings of their rows."""

    def __init__(self, path: Path, names: Mapping[str, str]) -> None:
        """`names` are the file's names of `prompt`, `messages` and `id`."""
        super().__init__(path)
        self._names = {column: name for name, column in names.items()}
        self._hidden = set(names) - set(self._names)  # columns whose name another one was given
        if find_spec("pyarrow") is None:
            raise MissingExtraError("pyarrow", "batch", f"reading {path.suffix} files")
        with _open_table(path) as table:
            known = {self._names.get(column, column) for column in table.columns if column not in self._hidden}
        if len(self._names) < len(names):
            raise InputError(f"{', '.join(map(repr, names.values()))} are to be {len(names)} columns of {path}")
        for name, column in names.items():
            if column not in table.columns:
                raise InputError(f"{path} has no column {column!r:.80}, which --{name}-column names")
        if not known & {"prompt", "messages"}:
            raise InputError(
                f"{path} has the columns {', '.join(table.columns)[:400]} and none for prompts; name it with "
                "--prompt-column or --messages-column"
            )

    def count(self, has: Callable[[int], bool]) -> int:
        """How many rows there are."""
        with _open_table(self.path) as table:
            return sum(map(has, range(1, sum(table.sizes) + 1)))

    def list_parts(self, num_rows: int) -> list[Part]:
        """Groups of rows, as the file has them."""
        parts, number = list[Part](), 1
        with _open_table(self.path) as table:
            for place, size in enumerate(table.sizes):
                if not parts or number - parts[-1].first >= num_rows:
                    parts.append(Part(number, place))
                number += size
        return parts

    def raw_rows(self, part: Part = _WHOLE) -> Iterator[tuple[int, bytes | BadLineError]]:
        number = part.first - 1
        with _open_table(self.path) as table:
            for batch in table.read(part.place):
                for row in batch.to_pylist():
                    number += 1
                    shown = {name: value for name, value in row.items() if name not in self._hidden}
                    named = {self._names.get(name, name): value for name, value in shown.items() if value is not None}
                    yield number, _write_row(named)


class _Table(NamedTuple):
    """A parquet or arrow file that is open."""

    columns: list[str]
    sizes: list[int]  # rows of its groups, or batches
    read: Callable[[int], Iterator[Any]]  # batches of rows from a group on


@contextmanager
def _open_table(path: Path) -> Iterator[_Table]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        if path.suffix == ".parquet":
            with pq.ParquetFile(path) as file:
                groups = range(file.num_row_groups)
                sizes = [file.metadata.row_group(place).num_rows for place in groups]
                names = file.schema_arrow.names
                yield _Table(names, sizes, lambda first: file.iter_batches(_ROWS, row_groups=groups[first:]))
        else:
            with pa.memory_map(str(path)) as memory, pa.ipc.open_file(memory) as file:
                places = range(file.num_record_batches)
                sizes = [file.get_batch(place).num_rows for place in places]
                yield _Table(file.schema.names, sizes, lambda first: map(file.get_batch, places[first:]))
    except pa.ArrowException as error:
        raise InputError(f"{path} can't be read: {error}") from error


def _write_row(row: dict[str, Any]) -> bytes | BadLineError:
    try:
        return json.dumps(row, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        return BadLineError(f"a column holds what JSON has no form for: {error}")


def open_source(path: Path | str, names: Mapping[str, str] | None = None) -> Source:
    """The rows of a file, by its name."""
    place = Path(path)
    if place.suffix in (".parquet", ".arrow", ".feather"):
        return ColumnFile(place, names or {})
    if names:
        raise InputError("columns are named for .parquet and .arrow files; the lines of a .jsonl file name their own")
    return JsonLines(place)
