"""The files that a batch writes: answers and errors, a line each, and a note of what the job is.

Lines are appended whole. After any end, be it `kill -9` or power, the files are cut behind their last whole line, and
what they hold says which rows are done.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import IO, Any, Final

from unspool.errors import InputError, SettingError, excerpt

_SYNC_SECONDS: Final = 1.0
_CHUNK: Final = 1 << 20


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

    def resume(self, done: Done) -> None:
        """Note the rows of lines that were written before, and cut off one that is not whole."""
        if not self.path.exists():
            return
        whole = 0
        with self.path.open("rb") as file:
            for line in file:
                number = _read_number(line)
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


def _read_number(line: bytes) -> int | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    number = value.get("line") if isinstance(value, dict) else None
    return number if isinstance(number, int) and not isinstance(number, bool) and 0 < number < 1 << 40 else None


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
            before = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InputError(f"{self.path} is damaged: {error}; begin again with --restart") from error
        now = json.loads(json.dumps(job))
        for name in sorted({*before, *now}) if isinstance(before, dict) else ["it"]:
            then = before.get(name) if isinstance(before, dict) else before
            if then != now.get(name):
                raise SettingError(
                    f"{self._output} was begun with {name} {excerpt(then)}, and now it is {excerpt(now.get(name))}: "
                    "answers would not belong together. Use what it was begun with, name another output, or use "
                    "--restart"
                )


class JobOutput:
    """The answers and errors of a job, and the note that a resumed one is compared with."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.answers = Appended(self.path)
        self.errors = Appended(self.path.with_name(f"{self.path.name}.errors"))
        self._note = Note(self.path.with_name(f"{self.path.name}.job"), self.path)
        self.done = Done()
        if self.path.is_dir() or not self.path.parent.is_dir():
            raise SettingError(f"{path} can't be an output: it is a folder, or its folder is not there")

    def refuse_input(self, source: Path) -> None:
        """Raise if what is read is one of the files that are written."""
        for path in (self.answers.path, self.errors.path, self._note.path):
            if path.exists() and path.samefile(source):
                raise SettingError(f"{path} is the file that is read, and would be written over; name another output")

    def open(self, job: dict[str, Any], *, restarts: bool = False) -> bool:
        """Begin, or go on with what was begun; whether there was something. Raises if that was another job."""
        if restarts:
            for path in (self.answers.path, self.errors.path, self._note.path):
                path.unlink(missing_ok=True)
        if not self._note.path.exists():
            if self.answers.path.exists() and self.answers.path.stat().st_size:
                raise SettingError(f"{self.path} exists and no batch wrote it; name another, or use --restart")
            self._note.write(job)
            return False
        self._note.compare(job)
        self.answers.resume(self.done)
        self.errors.resume(self.done)
        return True

    def close(self) -> None:
        """Sync and close both files."""
        self.answers.close()
        self.errors.close()
