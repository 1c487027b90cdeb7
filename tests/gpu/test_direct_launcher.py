"""Kernels that are launched without Triton's C code: what arrives is what was given."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.gpu.kernel_checks import IS_INTERPRETED

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or IS_INTERPRETED, reason="a GPU's driver launches them"),
]
triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")


@triton.jit(do_not_specialize=["small", "number", "large", "is_true", "part"])
def _store(OUT, WHOLE, ABSENT, small, number, large, is_true, part, HAS_ABSENT: tl.constexpr):
    at = tl.program_id(0) * 8
    tl.store(OUT + at, small.to(tl.float64))
    tl.store(OUT + at + 1, number.to(tl.float64))
    tl.store(OUT + at + 2, large.to(tl.float64))
    tl.store(OUT + at + 3, is_true.to(tl.float64))
    tl.store(OUT + at + 4, part.to(tl.float64))
    tl.store(OUT + at + 5, tl.load(WHOLE + 1).to(tl.float64))
    if HAS_ABSENT:
        tl.store(OUT + at + 6, tl.load(ABSENT).to(tl.float64))


@pytest.fixture
def kernel() -> Iterator[Any]:
    import unspool.kernels.gpu.launching  # noqa: F401 - which has Triton launch ours so
    from unspool.kernels.gpu.direct_launcher import DirectLauncher

    _store.__module__ = "unspool.kernels.gpu.of_a_test"  # ours are launched so
    yield _store
    made = [one for caches in _store.device_caches.values() for one in caches[0].values()]
    assert made and all(isinstance(one.run, DirectLauncher) for one in made)


def launch(kernel: Any, *, programs: int = 2) -> list[float]:
    out = torch.zeros(16, dtype=torch.float64, device="cuda")
    whole = torch.tensor([1.0, 2.5], dtype=torch.bfloat16, device="cuda")
    numbers = (-3, -(2**31), 2**52 + 1, True, 0.1)
    kernel[(programs,)](out, whole, None, *numbers, HAS_ABSENT=False)
    return out.tolist()


EXPECTED = [-3.0, float(-(2**31)), float(2**52 + 1), 1.0, pytest.approx(0.1, abs=1e-8), 2.5, 0.0, 0.0]


def test_arguments_arrive(kernel: Any) -> None:
    assert launch(kernel) == EXPECTED * 2
    assert launch(kernel, programs=1) == EXPECTED + [0.0] * 8
    assert launch(kernel, programs=0) == [0.0] * 16


def test_a_thread_that_has_no_context_launches_too(kernel: Any) -> None:
    out = torch.zeros(16, dtype=torch.float64, device="cuda")
    whole = torch.ones(2, device="cuda")
    launch(kernel)

    def work() -> None:
        kernel[(2,)](out, whole, out, 1, 2, 3, False, 0.5, HAS_ABSENT=False)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert out.tolist() == [1.0, 2.0, 3.0, 0.0, 0.5, 1.0, 0.0, 0.0] * 2


def test_launches_are_captured(kernel: Any) -> None:
    out, whole = torch.zeros(16, dtype=torch.float64, device="cuda"), torch.ones(2, device="cuda")

    def start(number: int) -> None:
        kernel[(1,)](out[8 * number :], whole, whole, number, 0, 0, True, 1.5, HAS_ABSENT=True)

    start(0)
    start(1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # two launches of one kernel share no memory that the second would overwrite
        start(0)
        start(1)
    out.zero_()
    whole.fill_(4.0)
    graph.replay()
    assert out.tolist() == [0.0, 0.0, 0.0, 1.0, 1.5, 4.0, 4.0, 0.0, 1.0, 0.0, 0.0, 1.0, 1.5, 4.0, 4.0, 0.0]


def test_hooks_are_called(kernel: Any) -> None:
    from triton import knobs

    log: list[str] = []
    knobs.runtime.launch_enter_hook = lambda metadata: log.append(metadata.get()["name"])
    knobs.runtime.launch_exit_hook = lambda _: log.append("end")
    try:
        launch(kernel)
    finally:
        knobs.runtime.launch_enter_hook = knobs.runtime.launch_exit_hook = None
    assert log == ["_store", "end"]


def test_a_kernel_that_cannot_be_started_says_why(kernel: Any) -> None:
    with pytest.raises(RuntimeError, match="Triton Error"):
        launch(kernel, programs=2**31)
