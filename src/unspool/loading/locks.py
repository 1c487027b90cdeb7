"""A lock between processes that is released when the process that holds it ends in any way."""

from __future__ import annotations

import errno
import os
import platform
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

_SECONDS_BETWEEN_TRIES = 0.2
_NO_LOCKS = (errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS)  # errors of file systems without locks

_held: weakref.WeakSet[FileLock] = weakref.WeakSet()


class FileLock:
    """A lock file that one holder has at a time, be it in this process or another; it says who."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_kept = True  # False: the file system has no locks, and others are not kept out
        self._file: IO[bytes] | None = None

    def take(self) -> bool:
        """Try to hold the lock; False if another process does."""
        while True:
            flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
            file = os.fdopen(os.open(self.path, flags, 0o644), "r+b", buffering=0)
            try:
                taken = _try_lock(file.fileno())
                if taken is False:
                    file.close()
                    return False
                self.is_kept = taken is not None
                # The last holder may have removed the file since it was opened: then the lock has no effect.
                if _is_at(file.fileno(), self.path):
                    file.truncate(0)
                    file.write(f"{os.getpid()} on {platform.node()}\n".encode())
                    break
            except BaseException:
                file.close()
                raise
            file.close()
        self._file = file
        _held.add(self)
        return True

    def find_holder(self) -> str:
        """Who holds it, as the holder wrote it: a process and its machine."""
        try:
            with self.path.open("rb") as file:
                text = file.read(200).decode(errors="replace").strip()
        except OSError:
            text = ""
        return f"process {text}" if text else "another process"

    def release(self) -> None:
        """Remove the file and let others have the lock; nothing if it is not held."""
        if self._file is None:
            return
        try:
            self.path.unlink(missing_ok=True)
        except OSError:  # Windows removes no file that is open
            pass
        finally:
            self.leave()

    def __del__(self) -> None:
        self.release()

    def leave(self) -> None:
        """Forget the lock, whose holder is the process that this one was forked from."""
        file, self._file = self._file, None
        if file is not None:
            file.close()


def _leave_all() -> None:
    """In a forked child: its copies of the files would hold the locks when its parent has ended."""
    for lock in list(_held):
        lock.leave()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_all)


@contextmanager
def hold_lock(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold the lock file at `path`; `on_wait` is called while another process does. It is removed at the end."""
    lock = FileLock(path)
    while not lock.take():
        on_wait()
        time.sleep(_SECONDS_BETWEEN_TRIES)
    try:
        yield
    finally:
        lock.release()


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _try_lock(descriptor: int) -> bool | None:
    """Whether the lock was free; None if the file system has no locks."""
    if sys.platform == "win32":
        import msvcrt

        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return None
    return True
