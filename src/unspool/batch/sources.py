"""Where rows come from: .jsonl files, and parquet or arrow files by their columns, read as they are needed."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

from unspool.batch.lines import MAX_LINE_BYTES, BadLineError, Line, parse_line
from unspool.errors import InputError, MissingExtraError, UnspoolError
from unspool.loading.digests import digest_file

_CHUNK: Final = 1 << 20
_ROWS: Final = 256  # that are taken out of a file of columns at once
_LARGE: Final = 64 << 20  # bytes of such rows, beyond which they are taken out one by one
_MOST_ROWS: Final = 1 << 31  # of a file of columns; a few bytes of it can say that there are any number


class Part(NamedTuple):
    """Rows of a file that can be read by themselves."""

    first: int  # the number of the first row, from 1
    place: int  # where they begin: a byte of a .jsonl file, a group of rows or a batch of other files


_WHOLE: Final = Part(1, 0)


class Counted(Protocol):
    """Rows that are a job's, by their numbers."""

    def has(self, number: int) -> bool:
        """Whether a row is one of them."""
        ...

    def count_to(self, last: int) -> int:
        """How many of the rows from 1 to `last` are."""
        ...


class Source(ABC):
    """A file of rows."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()  # workers have folders of their own
        if not path.is_file():
            raise InputError(f"{path} is not a file; give a .jsonl, .parquet or .arrow file with a request per line")
        self._state = self.path.stat()

    @property
    def modified(self) -> int:
        """When the file was changed, in seconds; answers are dated by it, so that they are the same every time."""
        return int(self._state.st_mtime)

    @property
    def names(self) -> dict[str, str]:
        """The file's names of `prompt`, `messages` and `id`, where they were given."""
        return {}

    def fingerprint(self) -> str:
        """A digest of the file's whole content."""
        return digest_file(self.path)

    def refuse_changes(self) -> None:
        """Raise if the file is another one than when it was opened: rows would be read from two."""
        state = self.path.stat() if self.path.exists() else None
        if state is None or (state.st_size, state.st_mtime_ns) != (self._state.st_size, self._state.st_mtime_ns):
            raise InputError(
                f"{self.path} was changed while it was read. What is written stays; put the file back as it was and "
                "start again, or name another output for the new one"
            )

    @abstractmethod
    def count(self, has: Callable[[int], bool]) -> int:
        """How many rows there are among those whose numbers `has` accepts."""

    def total(self, share: Counted) -> int:
        """How many rows there are in a share."""
        return self.count(share.has)

    @abstractmethod
    def bound(self) -> int:
        """A number that none of the file's rows is above."""

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

    def bound(self) -> int:
        """A number that none of the file's rows is above."""
        return self._state.st_size  # a line has a byte

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
        self._num_rows: int | None = None
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

    @property
    def names(self) -> dict[str, str]:
        """The file's names of `prompt`, `messages` and `id`, where they were given."""
        return {name: column for column, name in self._names.items()}

    def count(self, has: Callable[[int], bool]) -> int:
        """How many rows there are."""
        return sum(map(has, range(1, self.bound() + 1)))

    def bound(self) -> int:
        """A number that none of the file's rows is above."""
        if self._num_rows is None:
            with _open_table(self.path) as table:
                self._num_rows = sum(table.find_sizes())
        return self._num_rows

    def total(self, share: Counted) -> int:
        """How many rows there are in a share."""
        return share.count_to(self.bound())

    def list_parts(self, num_rows: int) -> list[Part]:
        """Groups of rows, as the file has them."""
        parts, number = list[Part](), 1
        with _open_table(self.path) as table:
            for place, size in enumerate(table.find_sizes()):
                if not parts or number - parts[-1].first >= num_rows:
                    parts.append(Part(number, place))
                number += size
        return parts

    def raw_rows(self, part: Part = _WHOLE) -> Iterator[tuple[int, bytes | BadLineError]]:
        number = part.first - 1
        with _open_table(self.path) as table:
            for rows in table.read(part.place):
                for row in _list_rows(rows):
                    number += 1
                    yield number, row if isinstance(row, BadLineError) else _write_row(self._name_columns(row))

    def _name_columns(self, row: dict[str, Any]) -> dict[str, Any]:
        shown = {name: value for name, value in row.items() if name not in self._hidden}
        return {self._names.get(name, name): value for name, value in shown.items() if value is not None}


class _Table(NamedTuple):
    """A parquet or arrow file that is open."""

    columns: list[str]
    find_sizes: Callable[[], list[int]]  # rows of its groups, or batches, which are read for it
    read: Callable[[int], Iterator[Any]]  # batches of rows from a group on


@contextmanager
def _open_table(path: Path) -> Iterator[_Table]:
    """The table in a file. The file is read, not mapped: a length in it that is false would end the process."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with _explaining_damage(path), pa.OSFile(str(path)) as content:
        if path.suffix == ".parquet":
            with pq.ParquetFile(content) as file:
                groups = range(file.num_row_groups)
                yield _Table(
                    file.schema_arrow.names,
                    lambda: _check_sizes([file.metadata.row_group(place).num_rows for place in groups], path),
                    lambda first: file.iter_batches(_ROWS, row_groups=groups[first:]),
                )
        else:
            with pa.ipc.open_file(content) as file:
                places = range(file.num_record_batches)
                yield _Table(
                    file.schema.names,
                    lambda: _check_sizes([_read_batch(file, place).num_rows for place in places], path),
                    lambda first: _cut_batches(file, places[first:]),
                )


@contextmanager
def _explaining_damage(path: Path) -> Iterator[None]:
    """Whatever pyarrow makes of a damaged file: its errors have no common root, and some are Python's own."""
    try:
        yield
    except UnspoolError:
        raise
    except Exception as error:
        raise InputError(f"{path} can't be read: {str(error)[:500] or type(error).__name__}") from error


def _check_sizes(sizes: list[int], path: Path) -> list[int]:
    if min(sizes, default=0) < 0 or sum(sizes) > _MOST_ROWS:
        raise InputError(f"{path} says that it has {sum(sizes)} rows; at most {_MOST_ROWS} are read from one file")
    return sizes


def _read_batch(file: Any, place: int) -> Any:
    """A batch of an arrow file, whose lengths and offsets have been checked: Arrow believes them."""
    batch = file.get_batch(place)
    batch.validate(full=True)
    return batch


def _cut_batches(file: Any, places: range) -> Iterator[Any]:
    for place in places:
        batch = _read_batch(file, place)
        for first in range(0, batch.num_rows, _ROWS):
            yield batch.slice(first, _ROWS)


def _list_rows(rows: Any) -> Iterator[dict[str, Any] | BadLineError]:
    """Rows as Python's objects, one by one if they are large or one of them can't be: a date beyond all calendars."""
    if rows.nbytes <= _LARGE or rows.num_rows == 1:
        try:
            yield from rows.to_pylist()
            return
        except Exception as error:
            if rows.num_rows == 1:
                yield BadLineError(f"a column holds what can't be read: {str(error)[:300] or type(error).__name__}")
                return
    for place in range(rows.num_rows):
        yield from _list_rows(rows.slice(place, 1))


def _write_row(row: dict[str, Any]) -> bytes | BadLineError:
    try:
        return json.dumps(row, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        return BadLineError(f"a column holds what JSON has no form for: {error}")


def open_source(path: Path | str, names: Mapping[str, str] | None = None) -> Source:
    """The rows of a file, by its name."""
    place = Path(path)
    if place.suffix in (".parquet", ".arrow", ".feather"):
        return ColumnFile(place, names or {})
    if names:
        raise InputError("columns are named for .parquet and .arrow files; the lines of a .jsonl file name their own")
    return JsonLines(place)
