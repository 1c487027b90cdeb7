"""The files that a batch writes: answers and errors, a line each, and a note of what the job is.

Lines are appended whole. After any end, be it `kill -9` or power, the files are cut behind their last whole line, and
what they hold says which rows are done.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Final

from unspool.errors import InputError, LoadError, ResourceError, SettingError, excerpt
from unspool.loading.locks import FileLock
from unspool.small_files import MAX_SETTINGS_BYTES, parse_json_object, read_bytes

_SYNC_SECONDS: Final = 1.0
_MOST_ROWS: Final = 1 << 32  # of a file that was not counted
_LONGEST_LINE: Final = 1 << 30  # bytes of an answer that is read again
_DIGESTS: Final = {"input": "an input", "weights": "model files"}  # what a digest in a note is of


class Done:
    """The numbers of rows that are done, a bit each."""

    def __init__(self) -> None:
        self._bits = bytearray()
        self._base = 0  # bytes of rows that are left out
        self.count = 0

    def cut(self, first: int, end: int) -> Done:
        """What is known of the rows from `first` to `end`."""
        part = Done()
        part._base = self._base + (first >> 3)
        part._bits = self._bits[first >> 3 : (end >> 3) + 1]
        return part

    def add(self, number: int) -> None:
        """Note a row."""
        place, bit = (number >> 3) - self._base, 1 << (number & 7)
        if place >= len(self._bits):
            self._bits.extend(bytes(max(place + 1 - len(self._bits), len(self._bits))))
        self.count += not self._bits[place] & bit
        self._bits[place] |= bit

    def __contains__(self, number: int) -> bool:
        place = (number >> 3) - self._base
        return 0 <= place < len(self._bits) and bool(self._bits[place] & 1 << (number & 7))


class Appended:
    """A file to which whole lines are appended."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.count = 0
        self._file: IO[bytes] | None = None
        self._synced = time.monotonic()

    def resume(self, done: Done, last: int) -> None:
        """Note the rows, up to the `last`, of lines that were written before, and cut off one that is not whole."""
        if not self.path.exists():
            return
        whole = 0
        with self.path.open("rb") as file:
            while line := file.readline(_LONGEST_LINE):
                number = _read_number(line, last)
                if not line.endswith(b"\n") or number is None:
                    if file.read(1):
                        raise InputError(
                            f"{self.path} has a line that this program did not write: {excerpt(line[:200])}; name "
                            "another output, or begin again with --restart"
                        )
                    break
                done.add(number)
                self.count += 1
                whole += len(line)
        if whole != self.path.stat().st_size:
            os.truncate(self.path, whole)

    def write(self, value: dict[str, Any]) -> None:
        """Append an object as a line; it is on the disk within a second."""
        self.write_line(dump_line(value))

    def write_line(self, data: bytes) -> None:
        """Append a line that is written already."""
        if self._file is None:
            self._file = self.path.open("ab", buffering=0)
        place = self._file.seek(0, os.SEEK_END)
        try:
            written = self._file.write(data)
            while written < len(data):  # a nearly full disk takes a part
                written += self._file.write(data[written:])
        except OSError as error:
            os.truncate(self.path, place)
            raise InputError(
                f"{self.path} can't be written: {error.strerror}. What is in it stays; make room and start again"
            ) from error
        self.count += 1
        if time.monotonic() - self._synced > _SYNC_SECONDS:
            self.sync()

    def sync(self) -> None:
        """Have the disk hold what was written."""
        if self._file is not None:
            os.fsync(self._file.fileno())
        self._synced = time.monotonic()

    def close(self) -> None:
        """Sync and close."""
        if self._file is not None:
            self.sync()
            self._file.close()
            self._file = None


def dump_line(value: dict[str, Any]) -> bytes:
    """An object as a line of an output."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(", ", ": ")).encode() + b"\n"


def _read_number(line: bytes, last: int) -> int | None:
    """The number of a line's row; None for a line that answers no row of the file."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    number = value.get("line") if isinstance(value, dict) else None
    return number if isinstance(number, int) and not isinstance(number, bool) and 0 < number <= last else None


class Note:
    """A file that says what a job is, so that no other one goes on with its answers."""

    def __init__(self, path: Path, output: Path) -> None:
        self.path, self._output = path, output

    def write(self, job: dict[str, Any]) -> None:
        """Write it, whole or not at all."""
        partial = self.path.with_name(f"{self.path.name}.partial")
        with partial.open("w", encoding="utf-8") as file:
            json.dump(job, file, indent=1, sort_keys=True)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self.path)

    def compare(self, job: dict[str, Any]) -> None:
        """Raise if the job that was begun is another one."""
        try:
            before = parse_json_object(read_bytes(self.path, MAX_SETTINGS_BYTES), str(self.path))
        except LoadError as error:
            raise InputError(f"{self.path} is damaged: {error}; begin again with --restart") from error
        found = list(_list_differences(before, json.loads(json.dumps(job))))
        if found:
            raise SettingError(
                f"{self._output} was begun with {'; and with '.join(found)}: answers would not belong together. "
                "Use what it was begun with, name another output, or use --restart"
            )


def _list_differences(before: dict[str, Any], now: dict[str, Any], within: str = "") -> Iterator[str]:
    """What two jobs differ in, each with what it was and what it is."""
    for name in sorted({*before, *now}):
        then, given = before.get(name), now.get(name)
        if then == given:
            continue
        if isinstance(then, dict) and isinstance(given, dict):
            yield from _list_differences(then, given, f"{name}: ")
        elif name in _DIGESTS and then is not None and given is not None:
            yield f"{_DIGESTS[name]} of another content ({excerpt(then, 12)}, and now it is {excerpt(given, 12)})"
        else:
            was = "nothing said" if name not in before else excerpt(then)
            yield f"{within}{name} {was}, and now it is {'not given' if name not in now else excerpt(given)}"


class JobOutput:
    """The answers and errors of a job, and the note that a resumed one is compared with."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.answers = Appended(self.path)
        self.errors = Appended(self.path.with_name(f"{self.path.name}.errors"))
        self._note = Note(self.path.with_name(f"{self.path.name}.job"), self.path)
        whole = self.path.resolve()  # a link is the same output
        self._lock = FileLock(whole.with_name(f".{whole.name}.lock"))
        self.done = Done()
        if self.path.is_dir() or not self.path.parent.is_dir():
            raise SettingError(f"{path} can't be an output: it is a folder, or its folder is not there")

    def refuse_input(self, source: Path) -> None:
        """Raise if what is read is one of the files that are written."""
        for path in (self.answers.path, self.errors.path, self._note.path):
            if path.exists() and path.samefile(source):
                raise SettingError(f"{path} is the file that is read, and would be written over; name another output")

    def open(self, job: dict[str, Any], *, last: int = _MOST_ROWS, restarts: bool = False) -> bool:
        """Begin, or go on with what was begun; whether there was something. Raises if that was another job.

        No other run writes until this one is closed; rows of answers are numbered up to the `last`.
        """
        take_output(self._lock, self.path)
        try:
            return self._open(job, last, restarts=restarts)
        except BaseException:
            self._lock.release()
            raise

    def _open(self, job: dict[str, Any], last: int, *, restarts: bool) -> bool:
        if restarts:
            for path in (self.answers.path, self.errors.path, self._note.path):
                path.unlink(missing_ok=True)
        if not self._note.path.exists():
            if self.answers.path.exists() and self.answers.path.stat().st_size:
                raise SettingError(f"{self.path} exists and no batch wrote it; name another, or use --restart")
            self._note.write(job)
            return False
        self._note.compare(job)
        self.answers.resume(self.done, last)
        self.errors.resume(self.done, last)
        return True

    @property
    def is_locked(self) -> bool:
        """Whether other runs are kept out: some network file systems have no locks."""
        return self._lock.is_kept

    def close(self) -> None:
        """Sync and close both files, and let another run have them."""
        try:
            self.answers.close()
            self.errors.close()
        finally:
            self._lock.release()


def take_output(lock: FileLock, output: Path) -> None:
    """Take the lock of an output; raises if another run has it."""
    try:
        is_free = lock.take()
    except OSError as error:
        raise InputError(f"{output} can't be written: {lock.path}: {error.strerror or error}") from error
    if not is_free:
        raise ResourceError(
            f"{output} is being written by {lock.find_holder()}: two runs would write every row twice. Wait for that "
            "one, end it, or name another output"
        )
