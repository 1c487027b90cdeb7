"""Which thread compiles a kernel, and who waits for it: with kernels that only count.

They run wherever Triton is: `TRITON_INTERPRET=1 pytest tests/gpu/test_launching.py`.
"""

from __future__ import annotations

import sys
import threading
import time
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tests.gpu.kernel_checks import pytestmark

from unspool.kernels.preparations import announce_preparation, end_preparation

__all__ = ["pytestmark"]


class Compiled:
    """What compiling gives."""

    run = None


class Kernel:
    """A kernel that takes a while to compile, once for every argument, and notes when and where."""

    def __init__(self, log: list[str], name: str, src: str, seconds: float = 0.05) -> None:
        self.log, self.name, self.src, self.seconds = log, name, src, seconds
        self.made: dict[Any, Compiled] = {}

    def warmup(self, what: int, *, grid: tuple[int, ...]) -> Any:
        from triton.runtime._async_compile import active_mode

        if what in self.made:
            return self.made[what]

        def compile_it() -> Compiled:
            time.sleep(self.seconds)
            self.log.append(f"{self.name} {what}")
            return Compiled()

        mode: Any = active_mode.get()
        return mode.submit((self.name, what), compile_it, lambda made: self.made.setdefault(what, made))

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def start(what: int) -> None:
            if what not in self.made:
                self.log.append(f"{self.name} {what} at its launch")
                self.made[what] = Compiled()
            self.log.append(f"{self.name} {what} started")

        return start


@pytest.fixture
def launching(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("triton.runtime._async_compile")
    from unspool.kernels.gpu import launching

    monkeypatch.setattr(launching, "can_compile_ahead", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    return launching


def test_what_is_compiled_beside_is_waited_for(launching: Any) -> None:
    log: list[str] = []
    small, large = Kernel(log, "small", "x", 0.2), Kernel(log, "large", "x" * 9, 0.2)
    turn, began = sys.getswitchinterval(), threading.Event()

    def work() -> None:
        launching.launch(small, (1,), 1)
        launching.launch(large, (1,), 2)
        launching.launch(large, (1,), 2)
        began.set()

    launching.compile_beside(work)
    began.wait()
    assert sys.getswitchinterval() < turn
    time.sleep(0.05)
    launching.launch(large, (1,), 2)
    assert log[-1] == "large 2 started" and "large 2 at its launch" not in log
    launching.wait_for_compilers()
    assert sys.getswitchinterval() == pytest.approx(turn)
    launching.launch(small, (1,), 1)
    launching.launch(small, (1,), 3)  # nobody has compiled this one
    assert log[-3:] == ["small 1 started", "small 3 at its launch", "small 3 started"]
    assert sorted(line for line in log[:-3] if "started" not in line) == ["large 2", "small 1"]  # each of them once
    assert not launching._under_way


def test_a_launch_waits_for_what_was_announced(launching: Any) -> None:
    log: list[str] = []
    kernel, announced = Kernel(log, "kernel", "x"), announce_preparation()

    def prepare() -> None:
        time.sleep(0.1)
        with launching.compile_ahead():
            launching.launch(kernel, (1,), 1)
            end_preparation(announced)

    thread = threading.Thread(target=prepare)
    thread.start()
    launching.launch(kernel, (1,), 1)
    thread.join()
    assert log == ["kernel 1", "kernel 1 started"]


def test_an_error_beside_leaves_a_kernel_to_its_launch(launching: Any) -> None:
    log: list[str] = []
    kernel = Kernel(log, "kernel", "x")
    turn = sys.getswitchinterval()
    launching.compile_beside(lambda: launching.launch(kernel, (1,), 1) or 1 / 0)
    launching.wait_for_compilers()
    launching.launch(kernel, (1,), 1)
    assert log == ["kernel 1 at its launch", "kernel 1 started"]
    assert sys.getswitchinterval() == pytest.approx(turn)
