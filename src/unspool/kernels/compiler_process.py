"""The process that compiles kernels beside this one (`gpu/compiler_server.py`), seen from here.

Half of a kernel's compilation is Python, so threads of one process compile few kernels in parallel, and delay whoever
reads weights meanwhile. What the other process compiles is found in Triton's cache of files. This stands apart from
the kernels, because the process is started before Triton is imported.
"""

from __future__ import annotations

import atexit
import itertools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from unspool.forks import make_lock

_SERVER: Final = Path(__file__).parent / "gpu" / "compiler_server.py"
_LONGEST: Final = 60.0  # seconds for one kernel
# Imported before the first kernel is asked for, one by one: with what they import, these are the kernels of a decoder's
# step. The first takes longest to compile.
_FIRST_MODULES: Final = (
    "unspool.kernels.gpu.attention.step_attention",
    "unspool.kernels.gpu.products.gating",
    "unspool.kernels.gpu.attention.rotating",
    "unspool.kernels.gpu.attention.turning",
    "unspool.kernels.gpu.sampling.tokens",
    "unspool.kernels.gpu.products.row_product",
    "triton.experimental.gluon",
    "unspool.kernels.gpu.products.product",
)


def has_cached_kernels() -> bool:
    """Whether anything is in Triton's cache of files."""
    home = os.environ.get("TRITON_HOME") or Path.home()
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or Path(home) / ".triton" / "cache")
    with suppress(OSError):
        return any(folder.iterdir())
    return False


class CompilerProcess:
    """A process that compiles what it is sent, started when it is first needed; it ends when it has nothing to do."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0  # a fork of this process has the pipes, and no right to them
        self._lock = make_lock(self, "_lock")
        self._numbers = itertools.count()
        self._asked: dict[int, Future[bool]] = {}
        self._knows_key = False

    def start(self) -> bool:
        """Whether the process runs: it is started if it does not."""
        with self._lock:
            if self._process is not None and self._owner == os.getpid() and self._process.poll() is None:
                return True
            if not hasattr(os, "fork") or getattr(sys, "frozen", False) or not sys.executable:
                return False
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-S", "-P", str(_SERVER)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                )
                self._owner, self._knows_key = os.getpid(), False
                self._write({"path": _list_paths(), "modules": _FIRST_MODULES})
            except OSError:
                return False
            listener = threading.Thread(target=self._listen, args=(self._process,), name="unspool kernels", daemon=True)
        listener.start()
        atexit.register(self._stop, self._process)
        return True

    def compile(self, job: Mapping[str, Any], triton_key: str) -> bool:
        """Whether a kernel was compiled, and is in the cache now. `triton_key` is Triton's hash of itself."""
        if not self.start():
            return False
        number, answer = next(self._numbers), Future[bool]()
        self._asked[number] = answer
        try:
            with self._lock:
                if not self._knows_key:
                    self._write({"triton_key": triton_key})
                    self._knows_key = True
                self._write({"number": number, **job})
            return answer.result(_LONGEST)
        except (OSError, TimeoutError):
            return False
        finally:
            self._asked.pop(number, None)

    def _write(self, message: Mapping[str, Any]) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")
        self._process.stdin.flush()

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        """Hand out answers until the process ends; then what is still asked for has none."""
        assert process.stdout is not None
        with suppress(OSError, ValueError):
            for line in process.stdout:
                number, is_done = map(int, line.split())
                self._answer(number, bool(is_done))
        process.wait()
        for number in list(self._asked) if process is self._process else ():
            self._answer(number, False)

    def _answer(self, number: int, is_done: bool) -> None:
        answer = self._asked.pop(number, None)
        if answer is not None:
            answer.set_result(is_done)

    def _stop(self, process: subprocess.Popen[bytes]) -> None:
        if self._owner == os.getpid() and process.poll() is None:
            process.kill()
            process.wait()


def _list_paths() -> list[str]:
    """Where the process finds what this one has imported, however it was installed."""
    roots = [str(Path(__file__).parents[2])]
    triton = find_spec("triton")
    if triton is not None and triton.origin is not None:
        roots.append(str(Path(triton.origin).parents[1]))
    found = [path or str(Path.cwd()) for path in sys.path]
    return found + [root for root in roots if root not in found]


COMPILERS: Final = CompilerProcess()
