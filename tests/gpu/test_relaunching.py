"""A kernel that is launched again gets the variant and the arguments that Triton would choose for it."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from tests.gpu.kernel_checks import DEVICE, pytestmark

__all__ = ["pytestmark"]
triton = pytest.importorskip("triton")
tl = triton.language


@triton.jit
def _combine(x, y, extra, step, shift, factor, BLOCK: tl.constexpr, OFFSET: tl.constexpr = 0):
    at = tl.arange(0, BLOCK)
    found = tl.load(x + at * step).to(tl.float32) * factor + shift.to(tl.float32) + OFFSET
    if extra is not None:
        found += tl.load(extra + at)
    tl.store(y + at, found)


def make_case(order: random.Random) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of all kinds that variants are compiled for."""
    dtype = order.choice([torch.float32, torch.bfloat16])
    x = torch.arange(4096, device=DEVICE).to(dtype)[order.choice([0, 1, 16]) :]
    extra = order.choice([None, torch.ones(64, device=DEVICE), torch.full((65,), 2.0, device=DEVICE)[1:]])
    y = torch.zeros(65, device=DEVICE)[order.choice([0, 1]) :]
    step, shift = order.choice([1, 2, 3, 16, 32]), order.choice([2, 16, 7, 1 << 31, 1 << 40, -(1 << 35)])
    named = {"BLOCK": order.choice([16, 64])} | order.choice([{}, {"OFFSET": 3}])
    return (x, y, extra, step, shift, order.choice([0.5, 2.0, 3.0])), named


def test_any_arguments_in_any_order_give_what_was_asked() -> None:
    from unspool.kernels.gpu.launching import launch

    order = random.Random(0)
    cases = [make_case(order) for _ in range(24)]  # nearly each is compiled, which takes a third of a second
    for (x, y, extra, step, shift, factor), named in order.choices(cases, k=400):
        size = named["BLOCK"]
        launch(_combine, (1,), x, y, extra, step, shift, factor, **named)
        wanted = x[: size * step : step].float() * factor + float(shift) + named.get("OFFSET", 0)
        wanted = wanted if extra is None else wanted + extra[:size]
        torch.testing.assert_close(y[:size], wanted)


def test_a_second_launch_does_not_ask_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        pytest.skip("Triton's interpreter compiles nothing that could be launched again")
    from unspool.kernels.gpu.launching import launch

    x, y = torch.ones(64, device=DEVICE), torch.zeros(64, device=DEVICE)
    launch(_combine, (1,), x, y, None, 1, 5, 2.0, BLOCK=64)
    monkeypatch.setattr(type(_combine), "run", lambda *_args, **_named: pytest.fail("it asked Triton"))
    launch(_combine, (1,), x, y, None, 1, 7, 3.0, BLOCK=64)
    assert y.tolist() == [10.0] * 64


def test_a_tensor_on_the_host_is_refused_as_before() -> None:
    if not torch.cuda.is_available():
        pytest.skip("Triton's interpreter reads the host's memory")
    from unspool.kernels.gpu.launching import launch

    x, y = torch.ones(64, device=DEVICE), torch.zeros(64, device=DEVICE)
    launch(_combine, (1,), x, y, None, 1, 5, 2.0, BLOCK=64)
    with pytest.raises(ValueError, match="cpu tensor"):
        launch(_combine, (1,), x.cpu(), y, None, 1, 5, 2.0, BLOCK=64)


def test_a_kernel_that_must_start_alone_is_one_that_was_launched_before() -> None:
    if not torch.cuda.is_available():
        pytest.skip("Triton's interpreter overlaps nothing")
    from unspool.kernels.gpu.launching import launch, start_alone
    from unspool.kernels.gpu.relaunching import OverlapError

    x, y = torch.ones(64, device=DEVICE), torch.zeros(64, device=DEVICE)
    with pytest.raises(OverlapError, match="not launched before"), start_alone():
        launch(_combine, (1,), x, y, None, 1, 5, 2.5, BLOCK=32, OFFSET=17)
    launch(_combine, (1,), x, y, None, 1, 5, 2.0, BLOCK=64)  # as it may be again
    _combine.__module__, theirs = "unspool.kernels.gpu.of_a_test", _combine.__module__  # ours are launched directly
    try:
        for _ in range(2):
            launch(_combine, (1,), x, y, None, 1, 9, 2.0, BLOCK=16, OFFSET=2)
    finally:
        _combine.__module__ = theirs
    y.zero_()
    with start_alone():
        launch(_combine, (1,), x, y, None, 1, 8, 3.0, BLOCK=16, OFFSET=2)
        launch(_combine, (1,), x[16:], y[16:], None, 1, 7, 3.0, BLOCK=16, OFFSET=2)
    assert y.tolist() == [13.0] * 16 + [12.0] * 16 + [0.0] * 32
    with pytest.raises(OverlapError, match="no kernel"), start_alone():
        y.zero_()
