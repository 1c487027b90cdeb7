"""The process that compiles kernels for another one: it imports Triton and the kernels once, and forks for each job.

`kernels/compiler_process.py` starts it as a script. Lines of JSON come in: first where modules are found, then what is
to be compiled. A job's number goes out when its kernel is in Triton's cache, or when it can't be compiled: whoever
launches it then compiles it, and sees why.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final, NoReturn

_IDLE: Final = 20.0  # seconds without a job, after which the process ends
_IN, _OUT = 0, 1


class _Nothing:
    """Whatever is asked of torch: kernels need none of it, and to import it takes longer than to compile them."""

    def __getattr__(self, name: str) -> _Nothing:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_args: Any, **_kwargs: Any) -> _Nothing:
        return self

    def __getitem__(self, _key: Any) -> _Nothing:
        return self

    def __or__(self, _other: Any) -> _Nothing:
        return self

    __ror__ = __or__

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __mro_entries__(self, _bases: tuple[Any, ...]) -> tuple[type, ...]:
        return ()


class _EmptyModule(ModuleType):
    def __getattr__(self, name: str) -> _Nothing:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing()


class _WithoutTorch(MetaPathFinder, Loader):
    """Finds torch, and everything in it, as empty modules."""

    def find_spec(self, name: str, _path: Sequence[str] | None, _target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] == "torch" else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _EmptyModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing in it."""


def main() -> None:
    """Read jobs until there are no more."""
    out = os.dup(_OUT)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, _OUT)  # what compilers print is no answer
    lines = _Lines()
    hello = lines.wait()
    if hello is None:
        return
    sys.path[:] = hello["path"]
    sys.meta_path.insert(0, _WithoutTorch())
    gc.disable()  # what is there stays, and its memory is shared with the forks, which do not live long
    _serve(lines, out, _import_first(hello["modules"]))


class _Lines:
    """Messages that come in."""

    def __init__(self) -> None:
        self._read = b""

    def wait(self) -> dict[str, Any] | None:
        """The first message; None if there is none."""
        while b"\n" not in self._read:
            if not self.take_in():
                return None
        return next(self.take())

    def take_in(self) -> bool:
        """Read what is there; False at its end."""
        found = os.read(_IN, 1 << 16)
        self._read += found
        return bool(found)

    def take(self) -> Iterator[dict[str, Any]]:
        """The messages that have been read."""
        while b"\n" in self._read:
            line, self._read = self._read.split(b"\n", 1)
            yield json.loads(line)


def _import_first(modules: Sequence[str]) -> Iterator[None]:
    """Import what most jobs need, and hash the kernels in it, in pieces between which a job may be started."""
    from triton import knobs
    from triton.runtime.jit import JITFunction

    importlib.import_module("triton.compiler.code_generator")  # what compiles, which Triton imports when it does
    yield
    with suppress(Exception):
        _ = knobs.nvidia.ptxas.version  # it is started to be asked
    for name in modules:
        yield
        with suppress(Exception):  # a job that needs it says so
            module = importlib.import_module(name)
            for kernel in list(vars(module).values()):
                if isinstance(kernel, JITFunction) and kernel.__module__ == name:
                    yield
                    _ = kernel.cache_key


def _serve(lines: _Lines, out: int, preparing: Iterator[None]) -> None:
    """Start jobs as they come, and prepare for more while none waits."""
    is_prepared = False
    running: dict[int, tuple[int, int]] = {}  # by the pipe that closes with a fork: its process, and its job's number
    while True:
        for message in lines.take():
            if "triton_key" in message:
                _set_key(message["triton_key"])
            else:
                _start(message, running)
        ready = select.select([_IN, *running], [], [], _IDLE if is_prepared else 0.0)[0]
        if not ready and not is_prepared:
            is_prepared = next(preparing, True) is True
        elif not ready and not running:
            return
        for found in ready:
            if found == _IN:
                if not lines.take_in():
                    return
            else:
                process, number = running.pop(found)
                os.close(found)
                _, status = os.waitpid(process, 0)
                os.write(out, b"%d %d\n" % (number, status == 0))


def _set_key(key: str) -> None:
    """Triton's hash of its own files, which takes a quarter of a second to find."""
    for name in ("triton.runtime.cache", "triton.compiler.compiler"):
        module = importlib.import_module(name)
        if hasattr(module, "triton_key"):
            vars(module)["triton_key"] = lambda: key


def _start(job: dict[str, Any], running: dict[int, tuple[int, int]]) -> None:
    with suppress(Exception):  # the fork finds out
        importlib.import_module(job["module"])
    closes, held = os.pipe()
    process = os.fork()
    if process == 0:
        _compile(job)
    os.close(held)
    running[closes] = (process, job["number"])


def _compile(job: dict[str, Any]) -> NoReturn:
    """Compile in a fork, and end it."""
    try:
        import triton
        from triton import knobs
        from triton.backends.compiler import GPUTarget

        if job["is_gluon"]:
            from triton.experimental.gluon._runtime import GluonASTSource as Source
        else:
            from triton.compiler import ASTSource as Source
        knobs.cache.dir = job["cache"]
        kernel = getattr(importlib.import_module(job["module"]), job["name"])
        source = Source(
            kernel,
            job["signature"],
            {tuple(place): value for place, value in job["constants"]},
            {tuple(place): value for place, value in job["attributes"]},
        )
        options = {name: _as_tuples(value) for name, value in job["options"].items()}
        triton.compile(source, target=GPUTarget(*job["target"]), options=options, _env_vars=job["environment"])
    except BaseException:  # nothing of a fork may run on in its parent's code
        os._exit(1)
    os._exit(0)


def _as_tuples(value: Any) -> Any:
    """JSON's lists as the tuples that they were."""
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


if __name__ == "__main__":
    main()
