"""A matrix times the output of an attention that is still in parts (`attention.parted_attention`), added to one row.

Every program adds up the parts for itself: a few more loads beside each other, in the place of one program per head
that would wait for the others.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from unspool.kernels.gpu.attention.output_parts import Parts
from unspool.kernels.gpu.attention.parted_attention import divide_keys
from unspool.kernels.gpu.launching import launch, launch_options, let_next_start, wait_for_input
from unspool.kernels.gpu.products.row_product import RowTiling, load_ahead, load_tile
from unspool.kernels.gpu.products.tilings import choose_tiling

MOST_NUMBERS: Final = 1 << 23  # of a matrix; with more it was not measured
# (outputs, inputs): measured in whole steps on an H200, 2026-11-16
_MEASURED: Final[dict[tuple[int, int], RowTiling]] = {
    (1024, 1024): RowTiling(4, 1024, 4),
    (1280, 1280): RowTiling(8, 512, 4, ahead=3),
}


@triton.jit
def _load_parts(
    VALUES, STATS, used, first,
    HEADS: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """The parts (heads, width) of COUNT heads from `first` on, one for each split, and their stats (heads,)."""
    head, rd = first + tl.arange(0, COUNT), tl.arange(0, D)
    values, tops, sums = (), (), ()
    for split in tl.static_range(SPLITS):
        is_part = (head < HEADS) & (split < used)
        part = split * HEADS + head
        values = values + (tl.load(VALUES + part[:, None] * D + rd[None, :], mask=is_part[:, None], other=0.0),)
        tops = tops + (tl.load(STATS + part, mask=is_part, other=float("-inf")),)
        sums = sums + (tl.load(STATS + SPLITS * HEADS + part, mask=is_part, other=0.0),)
    return values, tops, sums


@triton.jit
def _join_parts(values, tops, sums, SPLITS: tl.constexpr, SIZE: tl.constexpr):
    """The attention's output (SIZE,) from what `_load_parts` loaded."""
    peak = tops[0]  # the first split always has keys
    for split in tl.static_range(1, SPLITS):
        peak = tl.maximum(peak, tops[split])
    peak = tl.where(peak == float("-inf"), 0.0, peak)
    weights = ()
    whole = tl.zeros(peak.shape, tl.float32)
    for split in tl.static_range(SPLITS):
        weight = sums[split] * tl.exp(tops[split] - peak)
        weights = weights + (weight,)
        whole += weight
    share = 1.0 / tl.where(whole == 0.0, 1.0, whole)
    read = tl.zeros(values[0].shape, tl.float32)
    for split in tl.static_range(SPLITS):
        read += values[split].to(tl.float32) * (weights[split] * share)[:, None]
    return tl.reshape(read, (SIZE,))


@triton.jit
def _multiply_parts(
    W, VALUES, STATS, LENGTH, BIAS, Y, N,
    HEADS: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, HAS_BIAS: tl.constexpr, IS_EVEN: tl.constexpr, AHEAD: tl.constexpr,
    EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    K: tl.constexpr = HEADS * D
    first = tl.program_id(0) * BN
    place, rk = tl.arange(0, BN), tl.arange(0, BK)
    rn = first + place
    is_row = rn < N
    at = W + first.to(tl.int64) * K + place[:, None] * K + rk[None, :]
    loaded = load_ahead(at, at, is_row, rk, K, BK, AHEAD, False, IS_EVEN)
    bias = tl.zeros((BN,), tl.float32)
    if HAS_BIAS:
        bias += tl.load(BIAS + rn, mask=is_row, other=0.0).to(tl.float32)
    _, used = divide_keys(tl.load(LENGTH).to(tl.int32), SPLITS, BLOCK)
    if EARLY:
        let_next_start(PDL)
    wait_for_input(PDL)
    held = tl.load(Y + rn, mask=is_row, other=0.0).to(tl.float32)
    parts = ()
    for k in tl.static_range(0, K, BK):
        parts = parts + (_load_parts(VALUES, STATS, used, k // D, HEADS, D, SPLITS, BK // D),)
    total = tl.zeros((BN, BK), tl.float32)
    for k in tl.static_range(0, K, BK):
        if k < AHEAD * BK:
            w = loaded[0][k // BK]
        else:
            w = load_tile(at, is_row, rk, k, K, BK, IS_EVEN)
        part = parts[k // BK]
        x = _join_parts(part[0], part[1], part[2], SPLITS, BK).to(VALUES.dtype.element_ty).to(tl.float32)
        total += w.to(tl.float32) * x[None, :]
    if not EARLY:
        let_next_start(PDL)
    tl.store(Y + rn, (tl.sum(total, 1) + bias + held).to(Y.dtype.element_ty), mask=is_row)


def multiply_parts(
    weight: torch.Tensor,  # (outputs, heads * width)
    parts: Parts,
    out: torch.Tensor,  # (1, outputs): added to
    bias: torch.Tensor | None = None,
    tiling: RowTiling | None = None,
) -> None:
    """out += weight @ (the parts added up) + bias."""
    outputs, inputs = weight.shape
    tiling = tiling or _MEASURED.get((outputs, inputs)) or choose_tiling(outputs, inputs, 1, weight.dtype)
    assert tiling is not None
    rows, splits, heads, width = parts.values.shape
    assert rows == 1
    launch(
        _multiply_parts,
        (triton.cdiv(outputs, tiling.rows),),
        weight,
        parts.values,
        parts.stats,
        parts.lengths,
        bias if bias is not None else weight,
        out,
        outputs,
        HEADS=heads,
        D=width,
        SPLITS=splits,
        BLOCK=parts.block,
        BN=tiling.rows,
        BK=max(width, min(tiling.columns, triton.next_power_of_2(heads * width))),
        HAS_BIAS=bias is not None,
        IS_EVEN=outputs % tiling.rows == 0,
        AHEAD=tiling.ahead,
        EARLY=tiling.starts_next_early,
        num_warps=tiling.warps,
        maxnreg=tiling.registers,
        **launch_options(),
    )
