"""The process that compiles kernels: with a Triton that writes down what it is to compile."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from unspool.kernels import compiler_process
from unspool.kernels.compiler_process import CompilerProcess, has_cached_kernels

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="kernels are compiled in forks")

FAKE = {
    "triton/__init__.py": """
from pathlib import Path
from triton import knobs
from triton.runtime import cache

def compile(source, target, options, _env_vars):
    source.fn.begin()
    told = (source.signature, source.constants, source.attrs, target, options, _env_vars, cache.triton_key())
    Path(knobs.cache.dir, source.fn.__name__).write_text(repr(told))
""",
    "triton/knobs.py": "from types import SimpleNamespace\ncache = SimpleNamespace()\n",
    "triton/backends/__init__.py": "",
    "triton/backends/compiler.py": "def GPUTarget(*parts): return parts\n",
    "triton/compiler/__init__.py": """
from types import SimpleNamespace

def ASTSource(fn, signature, constants, attrs):
    return SimpleNamespace(fn=fn, signature=signature, constants=constants, attrs=attrs)
""",
    "triton/compiler/code_generator.py": "",
    "triton/compiler/compiler.py": "",
    "triton/experimental/__init__.py": "",
    "triton/experimental/gluon/__init__.py": "",
    "triton/experimental/gluon/_runtime.py": """
from types import SimpleNamespace

def GluonASTSource(fn, signature, constants, attrs):
    return SimpleNamespace(fn=fn, signature="of Gluon", constants=constants, attrs=attrs)
""",
    "triton/runtime/__init__.py": "",
    "triton/runtime/jit.py": "class JITFunction: pass\n",
    "triton/runtime/cache.py": "def triton_key(): return 'slow'\n",
    "some_kernels.py": """
import os
import torch.nn.functional as F
from torch import Tensor

Numbers = Tensor | None
WIDTHS = {F.nothing: 1}

class Module(Tensor):
    pass

class Sound:
    __name__ = "sound"
    def begin(self): print("this is no answer")

class Wrong:
    def begin(self): raise ValueError

class Fatal:
    def begin(self): os.abort()

sound, wrong, fatal = Sound(), Wrong(), Fatal()
""",
    "first_kernels.py": """
import time
from pathlib import Path
from triton.runtime.jit import JITFunction

class Hashed(JITFunction):
    __module__ = __name__
    hashed = []

    @property
    def cache_key(self):
        self.hashed.append(self)
        if len(self.hashed) == 1:  # a job comes in meanwhile
            time.sleep(0.5)
            return
        until = time.monotonic() + 20
        while not Path(__file__).with_name("sound").exists():
            if time.monotonic() > until:
                raise SystemExit

one, two = Hashed(), Hashed()
""",
}
JOB: dict[str, Any] = {
    "module": "some_kernels", "is_gluon": False, "signature": {"X": "*bf16", "n": "i32"},
    "constants": [[[1], 16], [[2, 0], None]],
    "attributes": [[[0], [["tt.divisibility", 16]]]], "options": {"types": ["a", "b"], "libs": [["c", "d"]], "n": 4},
    "target": ["cuda", 90, 32], "environment": {"A": "1"},
}  # fmt: skip


@pytest.fixture
def compilers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CompilerProcess]:
    for name, text in FAKE.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    process = CompilerProcess()
    yield process
    if process._process is not None:
        process._stop(process._process)


def test_kernels_are_compiled_as_they_were_described(compilers: CompilerProcess, tmp_path: Path) -> None:
    assert compilers.compile({**JOB, "name": "sound", "cache": str(tmp_path)}, "key")
    found = (tmp_path / "sound").read_text()
    options = {"types": ("a", "b"), "libs": (("c", "d"),), "n": 4}
    told = (JOB["signature"], {(1,): 16, (2, 0): None}, {(0,): [["tt.divisibility", 16]]}, ("cuda", 90, 32))
    assert found == repr((*told, options, {"A": "1"}, "key"))


def test_kernels_in_gluon_are_compiled_as_such(compilers: CompilerProcess, tmp_path: Path) -> None:
    assert compilers.compile({**JOB, "is_gluon": True, "name": "sound", "cache": str(tmp_path)}, "key")
    assert (tmp_path / "sound").read_text().startswith("('of Gluon'")


def test_a_job_does_not_wait_for_what_is_prepared(
    compilers: CompilerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler_process, "_FIRST_MODULES", ("first_kernels",))
    assert compilers.compile({**JOB, "name": "sound", "cache": str(tmp_path)}, "key")


@pytest.mark.parametrize("name", ["wrong", "fatal", "absent"])
def test_a_kernel_that_fails_is_left_to_who_launches_it(compilers: CompilerProcess, tmp_path: Path, name: str) -> None:
    assert not compilers.compile({**JOB, "name": name, "cache": str(tmp_path)}, "key")
    assert compilers.compile({**JOB, "name": "sound", "cache": str(tmp_path)}, "key")


def test_a_process_that_ended_is_started_again(compilers: CompilerProcess, tmp_path: Path) -> None:
    job = {**JOB, "name": "sound", "cache": str(tmp_path)}
    assert compilers.start() and compilers.start()
    first = compilers._process
    assert first is not None
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert compilers.compile(job, "key")
    assert compilers._process is not first
    compilers._owner = -1  # as a fork of this process sees it
    second = compilers._process
    assert compilers.compile(job, "key") and compilers._process is not second
    assert second is not None
    second.kill()
    second.wait()


def test_a_cache_of_kernels_is_looked_for_where_triton_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "none"))
    assert not has_cached_kernels()
    monkeypatch.delenv("TRITON_CACHE_DIR")
    monkeypatch.setenv("TRITON_HOME", str(tmp_path))
    assert not has_cached_kernels()
    (tmp_path / ".triton" / "cache" / "ABC").mkdir(parents=True)
    assert has_cached_kernels()
