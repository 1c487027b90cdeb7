"""One position of a Mamba block between its large products.

A window's convolution, of several rows in a kernel of its own and of one row after the projection (`state_projection`);
and the state, which is fed and read in one kernel, for a few rows with the product that gives the time steps. The
references are `kernels.scan.convolve` and `kernels.scan.step`. States are read in one place and written in another, so
that a step may be run again.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from unspool.kernels.gpu.launching import launch, launch_options, let_next_start, wait_for_input

CHANNELS: Final = 128  # per program of a convolution
FEW_CHANNELS: Final = 32  # per program that holds their states
TIMED_CHANNELS: Final = 16  # the same if it multiplies for their time steps too


@triton.jit
def soften(time):
    """log(1 + exp(time)), exact for small values too: what is lost of x in 1 + x is made good."""
    grown = tl.exp(tl.minimum(time, 20.0))
    above = 1.0 + grown
    made = tl.where(above == 1.0, grown, tl.log(above) * (grown / tl.where(above == 1.0, 1.0, above - 1.0)))
    return tl.where(time > 20.0, time, made)


@triton.jit
def begin_window(
    HELD, KEPT, KERNEL, BIAS, row, at, is_there, N, TAPS: tl.constexpr, HAS_BIAS: tl.constexpr, WRITES: tl.constexpr
):
    """What a window's last inputs at channels `at` add to its convolution, the weights of the new input, and the inputs
    that stay, which are written unless the caller does that.

    The inputs are the last step's, so they may be read before the kernel just before has ended.
    """
    total = tl.zeros(at.shape, tl.float32)
    if HAS_BIAS:
        total = tl.load(BIAS + at, mask=is_there, other=0.0)
    HELD += row * TAPS * N
    KEPT += row * TAPS * N
    stay = ()
    for tap in tl.static_range(TAPS - 1):
        held = tl.load(HELD + (tap + 1) * N + at, mask=is_there, other=0.0)
        total += held.to(tl.float32) * tl.load(KERNEL + tap * N + at, mask=is_there, other=0.0)
        if WRITES:
            tl.store(KEPT + tap * N + at, held, mask=is_there)
        stay = stay + (held,)
    return total, tl.load(KERNEL + (TAPS - 1) * N + at, mask=is_there, other=0.0), stay


@triton.jit
def end_window(PROJECTED, KEPT, total, weight, row, at, is_there, N, stride, TAPS: tl.constexpr):
    """silu of the convolution with the new inputs, which join the window."""
    new = tl.load(PROJECTED + row * stride + at, mask=is_there, other=0.0)
    tl.store(KEPT + (row * TAPS + TAPS - 1) * N + at, new.to(KEPT.dtype.element_ty), mask=is_there)
    total += new.to(tl.float32) * weight
    return total * tl.sigmoid(total)


@triton.jit
def _convolve(
    PROJECTED, HELD, KEPT, KERNEL, BIAS, U, ROUNDED, N, stride,
    TAPS: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = at < N
    let_next_start(PDL)
    total, weight, _ = begin_window(HELD, KEPT, KERNEL, BIAS, row, at, is_there, N, TAPS, HAS_BIAS, True)
    wait_for_input(PDL)
    u = end_window(PROJECTED, KEPT, total, weight, row, at, is_there, N, stride, TAPS)
    tl.store(U + row * N + at, u, mask=is_there)
    tl.store(ROUNDED + row * N + at, u.to(ROUNDED.dtype.element_ty), mask=is_there)


@triton.jit
def feed_state(
    state, decay, dt, u, b, c, skip, gate, NEXT, places, is_whole,
):  # fmt: skip
    """The state (states, channels) one position on, written to `NEXT`, and what is read from it, gated (channels,)."""
    state = tl.exp2(dt[None, :] * decay) * state + b[:, None] * (dt * u)[None, :]
    tl.store(NEXT + places, state, mask=is_whole)
    y = tl.sum(c[:, None] * state, 0) + u * skip
    return y * (gate * tl.sigmoid(gate))


@triton.jit
def _find_scale(values, count, eps):
    """1 over the root of the values' mean square."""
    return tl.rsqrt(tl.sum(values * values, 0) / count + eps)


@triton.jit
def _feed(
    PROJECTED, CHOSEN, TIMES, U, STATE, NEXT, DECAY, TIME_BIAS, SKIP, OUT, N, S, rank, eps,
    STATES: tl.constexpr, RANK: tl.constexpr, BLOCK: tl.constexpr, NORMS: tl.constexpr, PDL: tl.constexpr,
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
    state = tl.load(STATE + row * S * N + places, mask=is_whole, other=0.0)  # the last step's
    wait_for_input(PDL)
    time = tl.load(TIMES + row * N + at, mask=is_there, other=0.0).to(tl.float32)
    chosen = CHOSEN + row * (rank + 2 * S)
    b = tl.load(chosen + rank + one, mask=one < S, other=0.0).to(tl.float32)
    c = tl.load(chosen + rank + S + one, mask=one < S, other=0.0).to(tl.float32)
    if NORMS:  # the product of a scaled time is the scaled product
        rk = tl.arange(0, RANK)
        time *= _find_scale(tl.load(chosen + rk, mask=rk < rank, other=0.0).to(tl.float32), rank, eps)
        b *= _find_scale(b, S, eps)
        c *= _find_scale(c, S, eps)
    u = tl.load(U + row * N + at, mask=is_there, other=0.0)
    gate = tl.load(PROJECTED + row * 2 * N + N + at, mask=is_there, other=0.0).to(tl.float32)
    y = feed_state(state, decay, soften(time + bias), u, b, c, skip, gate, NEXT + row * S * N, places, is_whole)
    tl.store(OUT + row * N + at, y.to(OUT.dtype.element_ty), mask=is_there)


@triton.jit
def _feed_timed(
    GATES, CHOSEN, TIME, U, STATE, NEXT, DECAY, TIME_BIAS, SKIP, OUT, N, stride, eps,
    S: tl.constexpr, STATES: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr,
    BLOCK: tl.constexpr, NORMS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    one, rk = tl.arange(0, STATES), tl.arange(0, RANKS)
    is_there, is_rank = at < N, rk < RANK
    is_whole = (one < S)[:, None] & is_there[None, :]
    places = one[:, None] * N + at[None, :]
    # Nothing here is written by the kernels just before: the state is the last step's.
    w = tl.load(
        TIME + at.to(tl.int64)[:, None] * RANK + rk[None, :], mask=is_there[:, None] & is_rank[None, :], other=0.0
    )
    bias = tl.load(TIME_BIAS + at, mask=is_there, other=0.0)
    skip = tl.load(SKIP + at, mask=is_there, other=0.0)
    decay = tl.load(DECAY + places, mask=is_whole, other=0.0)
    state = tl.load(STATE + row * S * N + places, mask=is_whole, other=0.0)
    let_next_start(PDL)
    wait_for_input(PDL)
    chosen = CHOSEN + row * (RANK + 2 * S)
    kind = TIME.dtype.element_ty
    u = tl.load(U + row * N + at, mask=is_there, other=0.0)
    gate = tl.load(GATES + row * stride + at, mask=is_there, other=0.0).to(tl.float32)
    b = tl.load(chosen + RANK + one, mask=one < S, other=0.0).to(tl.float32)
    c = tl.load(chosen + RANK + S + one, mask=one < S, other=0.0).to(tl.float32)
    # The last of the loads: threads exchange it at once, and what comes after that waits for it.
    time = tl.load(chosen + rk, mask=is_rank, other=0.0).to(tl.float32)
    if NORMS:
        time = (time * _find_scale(time, RANK, eps)).to(kind).to(tl.float32)
        b *= _find_scale(b, S, eps)
        c *= _find_scale(c, S, eps)
    dt = soften(tl.sum(w.to(tl.float32) * time[None, :], 1) + bias)
    y = feed_state(state, decay, dt, u, b, c, skip, gate, NEXT + row * S * N, places, is_whole)
    tl.store(OUT + row * N + at, y.to(OUT.dtype.element_ty), mask=is_there)


@triton.jit
def _feed_heads(
    PROJECTED, TIMES, MIXED, STATE, NEXT, DECAY, TIME_BIAS, SKIP, OUT, N, stride, channels, least, most,
    S: tl.constexpr, STATES: tl.constexpr, SIZE: tl.constexpr, EACH: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * BLOCK
    at, one = first + tl.arange(0, BLOCK), tl.arange(0, STATES)
    head, group = at // SIZE, first // (SIZE * EACH)  # a block's channels belong to one group
    is_whole = (one < S)[:, None] & (at < N)[None, :]
    places = one[:, None] * N + at[None, :]
    bias, skip, decay = tl.load(TIME_BIAS + head), tl.load(SKIP + head), tl.load(DECAY + head)
    state = tl.load(STATE + row * S * N + places, mask=is_whole, other=0.0)  # the last step's
    let_next_start(PDL)
    wait_for_input(PDL)
    time = tl.load(TIMES + row * stride + head).to(tl.float32)
    gate = tl.load(PROJECTED + row * stride + at).to(tl.float32)
    mixed = MIXED + row * channels
    u = tl.load(mixed + at)
    b = tl.load(mixed + N + group * S + one, mask=one < S, other=0.0)
    c = tl.load(mixed + channels - N // (SIZE * EACH) * S + group * S + one, mask=one < S, other=0.0)
    dt = tl.minimum(tl.maximum(soften(time + bias), least), most)
    y = feed_state(state, decay[None, :], dt, u, b, c, skip, gate, NEXT + row * S * N, places, is_whole)
    tl.store(OUT + row * N + at, y.to(OUT.dtype.element_ty))


def convolve_step(
    projected: torch.Tensor,  # (rows, channels or more): the convolution's inputs first
    held: torch.Tensor,  # (rows, taps, channels): the last inputs
    kept: torch.Tensor,  # likewise, with the new ones: written
    kernel: torch.Tensor,  # (taps, channels) float32
    bias: torch.Tensor | None,  # (channels,) float32
    u: torch.Tensor,  # (rows, channels) float32: written
    rounded: torch.Tensor,  # (rows, channels): the same in the model's dtype
) -> None:
    """u = silu(convolution of the window), and the window moved on by one."""
    rows, taps, channels = held.shape
    launch(
        _convolve,
        (rows, triton.cdiv(channels, CHANNELS)),
        projected,
        held,
        kept,
        kernel,
        kernel if bias is None else bias,
        u,
        rounded,
        channels,
        projected.stride(0),
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
    eps: float | None = None,  # the time's part, B and C are normalised (Falcon-Mamba)
) -> None:
    """The state one position on, and what is read from it with the skip connection, gated."""
    rows, states, inner = state.shape
    rank = chosen.shape[1] - 2 * states
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
        rank,
        eps or 0.0,
        STATES=triton.next_power_of_2(states),
        RANK=triton.next_power_of_2(rank),
        BLOCK=FEW_CHANNELS,
        NORMS=eps is not None,
        num_warps=4,
        **launch_options(),
    )


def feed_timed(
    gates: torch.Tensor,  # (rows, inner), a part of longer rows or not
    chosen: torch.Tensor,  # (rows, time rank + 2 * states): the time's part, B, C
    time: torch.Tensor,  # (inner, time rank)
    u: torch.Tensor,  # (rows, inner) float32
    state: torch.Tensor,  # (rows, states, inner) float32
    following: torch.Tensor,  # likewise: written
    decay: torch.Tensor,  # (states, inner) float32, times log2(e)
    time_bias: torch.Tensor,  # (inner,) float32
    skip: torch.Tensor,  # (inner,) float32
    out: torch.Tensor,  # (rows, inner): written
    eps: float | None = None,
) -> None:
    """`feed_step` with the time steps' product: for a few rows, because the matrix is read anew for every row."""
    rows, states, inner = state.shape
    launch(
        _feed_timed,
        (triton.cdiv(inner, TIMED_CHANNELS), rows),
        gates,
        chosen,
        time,
        u,
        state,
        following,
        decay,
        time_bias,
        skip,
        out,
        inner,
        gates.stride(0),
        eps or 0.0,
        S=states,
        STATES=triton.next_power_of_2(states),
        RANK=time.shape[1],
        RANKS=triton.next_power_of_2(time.shape[1]),
        BLOCK=TIMED_CHANNELS,
        NORMS=eps is not None,
        num_warps=4,
        **launch_options(),
    )


def feed_heads_step(
    projected: torch.Tensor,  # (rows, width): the gate first
    times: torch.Tensor,  # (rows, heads), a part of the same rows: time steps before their bias and softplus
    mixed: torch.Tensor,  # (rows, inner + 2 * groups * states) float32: inputs, B, C after the convolution
    state: torch.Tensor,  # (rows, states, inner) float32
    following: torch.Tensor,  # likewise: written
    decay: torch.Tensor,  # (heads,) float32, times log2(e)
    time_bias: torch.Tensor,  # (heads,) float32
    skip: torch.Tensor,  # (heads,) float32
    out: torch.Tensor,  # (rows, inner): written
    num_groups: int,
    bounds: tuple[float, float],  # of a time step
) -> None:
    """Mamba-2's `feed_step`: one decay and one time step per head, B and C of its group."""
    rows, states, inner = state.shape
    heads = decay.shape[0]
    size, each = inner // heads, heads // num_groups
    block = min(FEW_CHANNELS, size * each & -(size * each))
    launch(
        _feed_heads,
        (inner // block, rows),
        projected,
        times,
        mixed,
        state,
        following,
        decay,
        time_bias,
        skip,
        out,
        inner,
        projected.stride(0),
        mixed.shape[1],
        bounds[0],
        bounds[1],
        S=states,
        STATES=triton.next_power_of_2(states),
        SIZE=size,
        EACH=each,
        BLOCK=block,
        num_warps=4,
        **launch_options(),
    )
