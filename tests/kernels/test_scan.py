"""The recurrence of state spaces against its definition, position by position in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unspool.kernels.scan import convolve, scan, step

LOG2_E = math.log2(math.e)


def make(rows: int, new: int, inner: int, width: int, seed: int, pace: float) -> dict[str, torch.Tensor]:
    """Inputs of a recurrence; a high pace forgets everything within a position."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    return {
        "state": draw(rows, width, inner),
        "dt": draw(rows, new, inner).abs() * pace,
        "a": -draw(width, inner).exp(),
        "u": draw(rows, new, inner),
        "b": draw(rows, new, width),
        "c": draw(rows, new, width),
    }


def define(state, dt, a, u, b, c):  # tensors, all of them
    """h_t = exp(dt_t a) h_{t-1} + dt_t u_t b_t and y_t = c_t h_t, a number at a time in float64."""
    state, dt, a, u, b, c = (part.double() for part in (state, dt, a, u, b, c))
    outputs = []
    for t in range(dt.shape[1]):
        state = torch.exp(dt[:, t, None] * a) * state + (dt[:, t] * u[:, t])[:, None] * b[:, t, :, None]
        outputs.append((c[:, t, :, None] * state).sum(dim=1))
    return torch.stack(outputs, dim=1), state


@settings(max_examples=60)
@given(
    rows=st.integers(1, 3),
    new=st.integers(1, 40),
    chunk=st.integers(1, 17),
    width=st.integers(1, 9),
    seed=st.integers(0, 99),
    pace=st.sampled_from([0.01, 0.3, 5.0, 500.0]),
)
def test_chunks_and_lanes_of_any_size_are_the_definition(
    rows: int, new: int, chunk: int, width: int, seed: int, pace: float
) -> None:
    parts = make(rows, new, 5, 3, seed, pace)
    expected, last = define(**parts)
    y, state = scan(**{**parts, "a": parts["a"] * LOG2_E}, chunk=chunk, width=width)
    scale = 1e-5 * max(1.0, float(expected.abs().max()), float(last.abs().max()))
    assert float((y - expected).abs().max()) < scale
    assert float((state - last).abs().max()) < scale
    assert torch.isfinite(y).all()


@pytest.mark.parametrize("width", [1, 4])
def test_positions_without_time_leave_the_state_bit_for_bit(width: int) -> None:
    parts = make(2, 11, 6, 4, 0, 0.2)
    parts["a"] *= LOG2_E
    ends = torch.tensor([4, 0])
    dt = parts["dt"].masked_fill((torch.arange(11) >= ends[:, None])[:, :, None], 0.0)
    _, state = scan(**{**parts, "dt": dt, "c": None}, width=width)
    _, alone = scan(
        parts["state"][:1],
        parts["dt"][:1, :4],
        parts["a"],
        parts["u"][:1, :4],
        parts["b"][:1, :4],
        None,
        width=width,
    )
    assert torch.equal(state[:1], alone)
    assert torch.equal(state[1], parts["state"][1])


def test_a_step_is_a_scan_of_one_position() -> None:
    parts = make(3, 1, 6, 4, 1, 0.2)
    parts["a"] *= LOG2_E
    y, state = scan(**parts)
    out = torch.empty_like(state)
    inputs = [parts[name][:, 0] for name in ("dt", "u", "b", "c")]
    found = step(parts["state"], inputs[0], parts["a"], *inputs[1:], out)
    assert torch.equal(out, state)
    assert torch.allclose(found, y[:, 0], atol=1e-6)


@pytest.mark.parametrize("num_new", [1, 2, 7])
@pytest.mark.parametrize("has_bias", [True, False])
def test_the_convolution_is_torchs(num_new: int, has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    window, kernel = torch.randn(2, 3 + num_new, 5, generator=generator), torch.randn(4, 5, generator=generator)
    bias = torch.randn(5, generator=generator) if has_bias else None
    expected = torch.nn.functional.conv1d(window.transpose(1, 2), kernel.t()[:, None], bias, groups=5).transpose(1, 2)
    assert torch.allclose(convolve(window, kernel, bias), expected, atol=1e-6)
