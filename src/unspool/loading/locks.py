"""A lock between processes that is released when the process that holds it ends in any way."""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_SECONDS_BETWEEN_TRIES = 0.2
_NO_LOCKS = (errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS)  # errors of file systems without locks


@contextmanager
def hold_lock(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold the lock file at `path`; `on_wait` is called while another process does. It is removed at the end."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            # The last holder may have removed the file since it was opened: then the lock has no effect.
            if _try_lock(descriptor) and _is_at(descriptor, path):
                break
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        on_wait()
        time.sleep(_SECONDS_BETWEEN_TRIES)
    try:
        yield
    finally:
        try:
            path.unlink(missing_ok=True)
        except OSError:  # Windows removes no file that is open
            pass
        finally:
            os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _try_lock(descriptor: int) -> bool:
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
    return True
