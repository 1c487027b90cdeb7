"""The experts of many tokens: the tokens of one expert are multiplied together, so its matrices are read once.

Every expert has a list of its pairs of a token and an expert, made on the device; grids are as large as the lists may
get, and programs without work end at once. The reference is `models.decoder.mixture.feed_experts`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl

from unspool.kernels.gpu.experts.gates import join_gate
from unspool.kernels.gpu.experts.routing import Routes, find_factor
from unspool.kernels.gpu.launching import launch, launch_options, let_next_start, wait_for_input

MOST_PAIRS: Final = 8192  # of a step: one program makes an expert's list
_SUMMED: Final = 1024  # numbers per program


@dataclass(frozen=True, slots=True)
class GroupTiling:
    """How a product of an expert's tokens is cut: outputs and columns at a time, warps, loads in flight."""

    outputs: int
    columns: int
    warps: int
    stages: int


# Measured on an H200, 2026-11-16 (`benchmarks/gpu_mixtures.py --tilings 8 64`).
USUAL_UP: Final = GroupTiling(32, 128, 4, 4)
USUAL_DOWN: Final = GroupTiling(64, 128, 4, 3)


@triton.jit
def _list_pairs(
    CHOSEN, LENGTHS, LISTS, COUNTS, num_pairs, P, TOP: tl.constexpr, NEW: tl.constexpr, PP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    pair = tl.arange(0, PP)
    let_next_start(PDL)
    wait_for_input(PDL)
    chosen = tl.load(CHOSEN + pair, mask=pair < num_pairs, other=-1)
    length = tl.load(LENGTHS + pair // (TOP * NEW), mask=pair < num_pairs, other=-1)
    is_mine = (chosen == expert) & (length >= 0)  # absent rows run through no expert
    place = tl.cumsum(is_mine.to(tl.int32), 0) - 1
    tl.store(LISTS + expert * P + place, pair, mask=is_mine)
    tl.store(COUNTS + expert, tl.sum(is_mine.to(tl.int32), 0))


@triton.jit
def _multiply_lists(
    W, BIAS, X, LISTS, COUNTS, OUT, limit, gain, P, N,
    K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SHARE: tl.constexpr,
    ACT: tl.constexpr, IS_GATED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_LIMIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Outputs (pairs, N) of some of one expert's pairs; input rows are a pair's number divided by SHARE."""
    first, expert, start = tl.program_id(0) * BN, tl.program_id(1), tl.program_id(2) * BM
    rm, rn, rk = tl.arange(0, BM), first + tl.arange(0, BN), tl.arange(0, BK)
    let_next_start(PDL)
    wait_for_input(PDL)
    count = tl.load(COUNTS + expert)
    if start < count:
        is_pair = start + rm < count
        pair = tl.load(LISTS + expert * P + start + rm, mask=is_pair, other=0)
        width = N
        if IS_GATED:
            width = 2 * N
        at = W + (expert.to(tl.int64) * width + rn)[:, None] * K + rk[None, :]
        beside = at + N.to(tl.int64) * K
        x_at = X + (pair // SHARE).to(tl.int64)[:, None] * K + rk[None, :]
        total = tl.zeros((BM, BN), tl.float32)
        other = tl.zeros((BM, BN), tl.float32)
        is_output = rn < N
        for k in tl.range(0, K, BK):
            is_column = rk + k < K
            w = tl.load(at + k, mask=is_output[:, None] & is_column[None, :], other=0.0)
            x = tl.load(x_at + k, mask=is_pair[:, None] & is_column[None, :], other=0.0)
            total = tl.dot(x, tl.trans(w), total, input_precision="ieee")
            if IS_GATED:
                v = tl.load(beside + k, mask=is_output[:, None] & is_column[None, :], other=0.0)
                other = tl.dot(x, tl.trans(v), other, input_precision="ieee")
        if HAS_BIAS:
            total += tl.load(BIAS + expert * width + rn, mask=is_output, other=0.0).to(tl.float32)[None, :]
        y = total
        if IS_GATED:
            if HAS_BIAS:
                other += tl.load(BIAS + expert * width + N + rn, mask=is_output, other=0.0).to(tl.float32)[None, :]
            y = join_gate(total, other, limit, gain, ACT, HAS_LIMIT)
        into = OUT + pair.to(tl.int64)[:, None] * N + rn[None, :]
        tl.store(into, y.to(OUT.dtype.element_ty), mask=is_pair[:, None] & is_output[None, :])


@triton.jit
def _add_shares(
    MADE, SHARES, LENGTHS, Y, scale, N,
    TOP: tl.constexpr, TP: tl.constexpr, NORMALISES: tl.constexpr,
    NEW: tl.constexpr, ADDS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    let_next_start(PDL)
    wait_for_input(PDL)
    if tl.load(LENGTHS + row // NEW) >= 0:
        into = Y + row.to(tl.int64) * N + at
        total = tl.zeros((BLOCK,), tl.float32)
        factor = find_factor(SHARES, row, scale, TOP, TP, NORMALISES)
        if ADDS:
            total += tl.load(into, mask=at < N, other=0.0).to(tl.float32)
        for slot in tl.static_range(TOP):
            share = tl.load(SHARES + row * TOP + slot) * factor
            made = tl.load(MADE + (row * TOP + slot).to(tl.int64) * N + at, mask=at < N, other=0.0)
            total += share * made.to(tl.float32)
        tl.store(into, total.to(Y.dtype.element_ty), mask=at < N)


@dataclass(slots=True)
class Lists:
    """The pairs of every expert."""

    pairs: torch.Tensor  # (experts, pairs) int32
    counts: torch.Tensor  # (experts,) int32

    @classmethod
    def make(cls, num_experts: int, num_pairs: int, device: torch.device) -> Lists:
        """Buffers for a number of pairs."""
        return cls(
            torch.zeros(num_experts, num_pairs, dtype=torch.int32, device=device),
            torch.zeros(num_experts, dtype=torch.int32, device=device),
        )


def list_pairs(routes: Routes, lengths: torch.Tensor, lists: Lists) -> None:
    """Give every expert the list of its pairs; `lengths` has -1 for absent rows."""
    tokens, num_chosen = routes.chosen.shape
    num_pairs = tokens * num_chosen
    launch(
        _list_pairs,
        (lists.counts.shape[0],),
        routes.chosen,
        lengths,
        lists.pairs,
        lists.counts,
        num_pairs,
        lists.pairs.shape[1],
        TOP=num_chosen,
        NEW=tokens // lengths.shape[0],
        PP=triton.next_power_of_2(num_pairs),
        num_warps=4 if num_pairs <= 1024 else 8,
        **launch_options(),
    )


def count_rows(num_pairs: int, num_experts: int, num_tokens: int) -> int:
    """Pairs that a program multiplies together: twice as many as an expert has on average."""
    usual = int(triton.next_power_of_2(max(1, 2 * num_pairs // num_experts)))
    return min(64, max(16, min(usual, int(triton.next_power_of_2(num_tokens)))))


def multiply_lists(
    weight: torch.Tensor,  # (experts * outputs, inputs): gate above value in every expert's part if gated
    x: torch.Tensor,  # (pairs / share, inputs)
    lists: Lists,
    out: torch.Tensor,  # (pairs, outputs), half as many if gated
    *,
    share: int,  # pairs that read the same row of x
    num_tokens: int,  # the most pairs of one expert
    tiling: GroupTiling,
    bias: torch.Tensor | None = None,
    activation: int = 0,
    is_gated: bool = False,
    limit: float | None = None,  # of gpt-oss's gate
    gain: float = 1.0,
) -> None:
    """Every pair's row times the matrix of its expert."""
    experts, outputs = lists.counts.shape[0], out.shape[1]
    rows = count_rows(out.shape[0], experts, num_tokens)
    launch(
        _multiply_lists,
        (triton.cdiv(outputs, tiling.outputs), experts, triton.cdiv(num_tokens, rows)),
        weight,
        bias if bias is not None else weight,
        x,
        lists.pairs,
        lists.counts,
        out,
        limit or 0.0,
        gain,
        lists.pairs.shape[1],
        outputs,
        K=weight.shape[1],
        BM=rows,
        BN=tiling.outputs,
        BK=min(tiling.columns, max(16, triton.next_power_of_2(weight.shape[1]))),
        SHARE=share,
        ACT=activation,
        IS_GATED=is_gated,
        HAS_BIAS=bias is not None,
        HAS_LIMIT=limit is not None,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        **launch_options(),
    )


def add_shares(
    made: torch.Tensor,  # (tokens * chosen, hidden)
    routes: Routes,
    lengths: torch.Tensor,
    out: torch.Tensor,  # (tokens, hidden)
    *,
    adds: bool = False,
) -> None:
    """The weighted sum of the experts' outputs, added to `out` if `adds`; absent rows stay as they are."""
    tokens, hidden = out.shape
    launch(
        _add_shares,
        (tokens, triton.cdiv(hidden, _SUMMED)),
        made,
        routes.shares,
        lengths,
        out,
        routes.scale,
        hidden,
        **routes.weighing,
        NEW=tokens // lengths.shape[0],
        ADDS=adds,
        BLOCK=_SUMMED,
        **launch_options(),
    )
