"""The experts of one token, or of a few: every pair of a token and an expert reads the expert's matrices by itself.

The reference is `models.decoder.mixture.feed_experts`. Reading the matrices is the cost, and only those of chosen
experts are read: a program takes the number of its expert from the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl

from unspool.kernels.gpu.experts.gates import join_gate
from unspool.kernels.gpu.experts.routing import Routes, find_factor
from unspool.kernels.gpu.launching import (
    LINE_BYTES,
    ask_for,
    can_overlap,
    launch,
    launch_options,
    let_next_start,
    wait_for_input,
)


@dataclass(frozen=True, slots=True)
class ExpertTiling:
    """How an expert's matrix is cut: rows and columns per program, and its warps."""

    rows: int
    columns: int
    warps: int


_MOST_ASKED: Final = 1 << 16  # bytes per program
_LINE = tl.constexpr(LINE_BYTES)
# Measured on an H200, 2026-11-16 (`benchmarks/gpu_mixtures.py --tilings 1`).
USUAL_UP: Final = ExpertTiling(1, 2048, 4)
USUAL_DOWN: Final = ExpertTiling(4, 1024, 4)


@triton.jit
def _feed_up(
    W, BIAS, X, CHOSEN, INNER, limit, gain,
    F: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TOP: tl.constexpr,
    ACT: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_LIMIT: tl.constexpr, IS_EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    first, pair = tl.program_id(0) * BN, tl.program_id(1)
    place, rk = tl.arange(0, BN), tl.arange(0, BK)
    rn = first + place
    wait_for_input(PDL)
    expert = tl.load(CHOSEN + pair).to(tl.int64)
    # Only now, so that whoever runs after this kernel may read the routes without waiting.
    let_next_start(PDL)
    at = W + (expert * (2 * F) + first) * K + place[:, None] * K + rk[None, :]
    beside = at + F * K
    x_at = X + (pair // TOP).to(tl.int64) * K + rk
    is_row = rn < F
    total = tl.zeros((BN, BK), tl.float32)
    other = tl.zeros((BN, BK), tl.float32)
    for k in tl.static_range(0, K, BK):
        if IS_EVEN and k + BK <= K:
            w = tl.load(at + k, eviction_policy="evict_first")
            v = tl.load(beside + k, eviction_policy="evict_first")
        else:
            is_number = is_row[:, None] & (rk + k < K)[None, :]
            w = tl.load(at + k, mask=is_number, other=0.0, eviction_policy="evict_first")
            v = tl.load(beside + k, mask=is_number, other=0.0, eviction_policy="evict_first")
        x = tl.load(x_at + k, mask=rk + k < K, other=0.0).to(tl.float32)
        total += w.to(tl.float32) * x[None, :]
        other += v.to(tl.float32) * x[None, :]
    gate, value = tl.sum(total, 1), tl.sum(other, 1)
    if HAS_BIAS:
        bias_at = BIAS + expert * (2 * F) + rn
        gate += tl.load(bias_at, mask=is_row, other=0.0).to(tl.float32)
        value += tl.load(bias_at + F, mask=is_row, other=0.0).to(tl.float32)
    y = join_gate(gate, value, limit, gain, ACT, HAS_LIMIT)
    tl.store(INNER + pair.to(tl.int64) * F + rn, y.to(INNER.dtype.element_ty), mask=is_row)


@triton.jit
def _feed_down(
    W, BIAS, INNER, CHOSEN, SHARES, Y, scale, N,
    F: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    TOP: tl.constexpr, TP: tl.constexpr, NORMALISES: tl.constexpr,
    ADDS: tl.constexpr, HAS_BIAS: tl.constexpr, IS_EVEN: tl.constexpr, LINES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    first, row = tl.program_id(0) * BN, tl.program_id(1)
    place, rk = tl.arange(0, BN), tl.arange(0, BK)
    rn = first + place
    is_row = rn < N
    # The routes are there: `_feed_up`, which this kernel starts after, has waited for them.
    factor = find_factor(SHARES, row, scale, TOP, TP, NORMALISES)
    expert = tl.load(CHOSEN + row * TOP).to(tl.int64)
    at = W + (expert * N + first) * F + place[:, None] * F + rk[None, :]
    if IS_EVEN and BK <= F:
        w = tl.load(at, eviction_policy="evict_first")
    else:
        w = tl.load(at, mask=is_row[:, None] & (rk < F)[None, :], other=0.0, eviction_policy="evict_first")
    if LINES > 0:  # what is read later, while the kernel before still runs
        column = tl.arange(0, LINES) * (_LINE // (W.dtype.element_ty.primitive_bitwidth // 8))
        for slot in tl.static_range(1, TOP):
            later = tl.load(CHOSEN + row * TOP + slot).to(tl.int64)
            lines = W + (later * N + first) * F + place[:, None] * F + column[None, :]
            ask_for(lines, is_row[:, None] & (column < F)[None, :], PDL)
    let_next_start(PDL)
    wait_for_input(PDL)
    held = tl.zeros((BN,), tl.float32)
    y_at = Y + row.to(tl.int64) * N + rn
    if ADDS:
        held = tl.load(y_at, mask=is_row, other=0.0).to(tl.float32)
    total = tl.zeros((BN, BK), tl.float32)
    for slot in tl.static_range(TOP):
        share = tl.load(SHARES + row * TOP + slot) * factor
        if slot > 0:
            expert = tl.load(CHOSEN + row * TOP + slot).to(tl.int64)
            at = W + (expert * N + first) * F + place[:, None] * F + rk[None, :]
        if HAS_BIAS:
            held += share * tl.load(BIAS + expert * N + rn, mask=is_row, other=0.0).to(tl.float32)
        x_at = INNER + (row * TOP + slot).to(tl.int64) * F + rk
        for k in tl.static_range(0, F, BK):
            if slot > 0 or k > 0:
                if IS_EVEN and k + BK <= F:
                    w = tl.load(at + k, eviction_policy="evict_first")
                else:
                    is_number = is_row[:, None] & (rk + k < F)[None, :]
                    w = tl.load(at + k, mask=is_number, other=0.0, eviction_policy="evict_first")
            x = tl.load(x_at + k, mask=rk + k < F, other=0.0).to(tl.float32) * share
            total += w.to(tl.float32) * x[None, :]
    y = tl.sum(total, 1) + held
    tl.store(y_at, y.to(Y.dtype.element_ty), mask=is_row)


def _count_lines(weight: torch.Tensor, routes: Routes, tiling: ExpertTiling) -> int:
    """Cache lines of a matrix's row that are asked for ahead; 0 if a program reads so much that the cache overflows."""
    row_bytes = weight.shape[1] * weight.element_size()
    if not can_overlap() or row_bytes * tiling.rows * routes.chosen.shape[1] > _MOST_ASKED:
        return 0
    return int(triton.next_power_of_2(triton.cdiv(row_bytes, LINE_BYTES)))


def feed_up(
    weight: torch.Tensor,  # (experts * 2 * ffn, hidden): gate above value in every expert's part
    routes: Routes,
    inner: torch.Tensor,  # (tokens * chosen, ffn)
    activation: int,
    *,
    bias: torch.Tensor | None = None,
    limit: float | None = None,  # of gpt-oss's gate
    gain: float = 1.0,
    tiling: ExpertTiling = USUAL_UP,
) -> None:
    """activation(gate) · value of every pair of a token and one of its experts."""
    pairs, size = inner.shape
    hidden = weight.shape[1]
    launch(
        _feed_up,
        (triton.cdiv(size, tiling.rows), pairs),
        weight,
        bias if bias is not None else weight,
        routes.normed,
        routes.chosen,
        inner,
        limit or 0.0,
        gain,
        F=size,
        K=hidden,
        BN=tiling.rows,
        BK=min(tiling.columns, triton.next_power_of_2(hidden)),
        TOP=routes.chosen.shape[1],
        ACT=activation,
        HAS_BIAS=bias is not None,
        HAS_LIMIT=limit is not None,
        IS_EVEN=size % tiling.rows == 0,
        num_warps=tiling.warps,
        **launch_options(),
    )


def feed_down(
    weight: torch.Tensor,  # (experts * hidden, ffn)
    routes: Routes,
    inner: torch.Tensor,  # (tokens * chosen, ffn)
    out: torch.Tensor,  # (tokens, hidden)
    *,
    bias: torch.Tensor | None = None,
    adds: bool = False,
    tiling: ExpertTiling = USUAL_DOWN,
) -> None:
    """The weighted sum of the experts' outputs, added to `out` if `adds`."""
    tokens, hidden = out.shape
    size = inner.shape[1]
    launch(
        _feed_down,
        (triton.cdiv(hidden, tiling.rows), tokens),
        weight,
        bias if bias is not None else weight,
        inner,
        routes.chosen,
        routes.shares,
        out,
        routes.scale,
        hidden,
        F=size,
        BN=tiling.rows,
        BK=min(tiling.columns, triton.next_power_of_2(size)),
        **routes.weighing,
        ADDS=adds,
        HAS_BIAS=bias is not None,
        IS_EVEN=hidden % tiling.rows == 0,
        LINES=_count_lines(weight, routes, tiling),
        num_warps=tiling.warps,
        **launch_options(),
    )
