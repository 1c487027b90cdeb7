"""One position of a Mamba block, in two kernels around its small products.

The first shifts the convolution's window and applies it; the second feeds the state and gates what is read from it.
The references are `kernels.scan.convolve` and `kernels.scan.step`. States are read in one place and written in another,
so that a step may be run again.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from unspool.kernels.gpu.launching import launch, launch_options, let_next_start, wait_for_input

CHANNELS: Final = 128  # per program
FEW_CHANNELS: Final = 32  # per program of the second kernel, which holds their states


@triton.jit
def _convolve(
    PROJECTED, HELD, KEPT, KERNEL, BIAS, U, ROUNDED, N,
    TAPS: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = at < N
    let_next_start(PDL)
    total = tl.zeros((BLOCK,), tl.float32)
    if HAS_BIAS:
        total = tl.load(BIAS + at, mask=is_there, other=0.0)
    wait_for_input(PDL)
    HELD += row * TAPS * N
    KEPT += row * TAPS * N
    for tap in tl.static_range(TAPS - 1):
        held = tl.load(HELD + (tap + 1) * N + at, mask=is_there, other=0.0)
        total += held.to(tl.float32) * tl.load(KERNEL + tap * N + at, mask=is_there, other=0.0)
        tl.store(KEPT + tap * N + at, held, mask=is_there)
    new = tl.load(PROJECTED + row * 2 * N + at, mask=is_there, other=0.0)
    total += new.to(tl.float32) * tl.load(KERNEL + (TAPS - 1) * N + at, mask=is_there, other=0.0)
    tl.store(KEPT + (TAPS - 1) * N + at, new.to(KEPT.dtype.element_ty), mask=is_there)
    total = total * tl.sigmoid(total)
    tl.store(U + row * N + at, total, mask=is_there)
    tl.store(ROUNDED + row * N + at, total.to(ROUNDED.dtype.element_ty), mask=is_there)


@triton.jit
def _feed(
    PROJECTED, CHOSEN, TIMES, U, STATE, NEXT, DECAY, TIME_BIAS, SKIP, OUT, N, S, rank,
    STATES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    one = tl.arange(0, STATES)
    is_there = at < N
    is_whole = (one < S)[:, None] & is_there[None, :]
    places = one[:, None] * N + at[None, :]
    let_next_start(PDL)
    bias = tl.load(TIME_BIAS + at, mask=is_there, other=0.0)
    skip = tl.load(SKIP + at, mask=is_there, other=0.0)
    decay = tl.load(DECAY + places, mask=is_whole, other=0.0)
    wait_for_input(PDL)
    state = tl.load(STATE + row * S * N + places, mask=is_whole, other=0.0)
    time = tl.load(TIMES + row * N + at, mask=is_there, other=0.0).to(tl.float32) + bias
    grown = tl.exp(tl.minimum(time, 20.0))
    above = 1.0 + grown  # log(1 + x) is x where x is lost beside 1, and elsewhere that loss is made good
    made = tl.where(above == 1.0, grown, tl.log(above) * (grown / tl.where(above == 1.0, 1.0, above - 1.0)))
    dt = tl.where(time > 20.0, time, made)
    u = tl.load(U + row * N + at, mask=is_there, other=0.0)
    chosen = CHOSEN + row * (rank + 2 * S) + rank
    b = tl.load(chosen + one, mask=one < S, other=0.0).to(tl.float32)
    c = tl.load(chosen + S + one, mask=one < S, other=0.0).to(tl.float32)
    state = tl.exp2(dt[None, :] * decay) * state + b[:, None] * (dt * u)[None, :]
    tl.store(NEXT + row * S * N + places, state, mask=is_whole)
    y = tl.sum(c[:, None] * state, 0) + u * skip
    gate = tl.load(PROJECTED + row * 2 * N + N + at, mask=is_there, other=0.0).to(tl.float32)
    y *= gate * tl.sigmoid(gate)
    tl.store(OUT + row * N + at, y.to(OUT.dtype.element_ty), mask=is_there)


def convolve_step(
    projected: torch.Tensor,  # (rows, 2 * inner): the convolution's inputs, and the gate
    held: torch.Tensor,  # (rows, taps, inner): the last inputs
    kept: torch.Tensor,  # likewise, with the new ones: written
    kernel: torch.Tensor,  # (taps, inner) float32
    bias: torch.Tensor | None,  # (inner,) float32
    u: torch.Tensor,  # (rows, inner) float32: written
    rounded: torch.Tensor,  # (rows, inner): the same in the model's dtype
) -> None:
    """u = silu(convolution of the window), and the window moved on by one."""
    rows, taps, inner = held.shape
    launch(
        _convolve,
        (rows, triton.cdiv(inner, CHANNELS)),
        projected,
        held,
        kept,
        kernel,
        kernel if bias is None else bias,
        u,
        rounded,
        inner,
        TAPS=taps,
        HAS_BIAS=bias is not None,
        BLOCK=CHANNELS,
        num_warps=4,
        **launch_options(),
    )


def feed_step(
    projected: torch.Tensor,  # (rows, 2 * inner)
    chosen: torch.Tensor,  # (rows, time rank + 2 * states): the time's part, B, C
    times: torch.Tensor,  # (rows, inner): time steps before their bias and softplus
    u: torch.Tensor,  # (rows, inner) float32
    state: torch.Tensor,  # (rows, states, inner) float32
    following: torch.Tensor,  # likewise: written
    decay: torch.Tensor,  # (states, inner) float32, times log2(e)
    time_bias: torch.Tensor,  # (inner,) float32
    skip: torch.Tensor,  # (inner,) float32
    out: torch.Tensor,  # (rows, inner): written
) -> None:
    """The state one position on, and what is read from it with the skip connection, gated."""
    rows, states, inner = state.shape
    launch(
        _feed,
        (rows, triton.cdiv(inner, FEW_CHANNELS)),
        projected,
        chosen,
        times,
        u,
        state,
        following,
        decay,
        time_bias,
        skip,
        out,
        inner,
        states,
        chosen.shape[1] - 2 * states,
        STATES=triton.next_power_of_2(states),
        BLOCK=FEW_CHANNELS,
        num_warps=4,
        **launch_options(),
    )
