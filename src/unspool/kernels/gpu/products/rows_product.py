"""A matrix times several rows on the tensor cores; quantised numbers are unpacked in registers on the way there.

The reference is `Words.dequantise` and `F.linear`. A program computes some outputs of some rows. Where there are few
outputs the columns are split among programs, each of which writes what its columns add up to; `parts.add_parts` adds
these, with the residual and the norm that the next product needs anyway.

A word's numbers lie some columns apart, and the tensor cores take what a thread has in an order of their own. So the
rows have been arranged (`arranging`) as `unpacking` gives the numbers.

A round of the loop ends when its products have (`_settle`). Triton would let Hopper's tensor cores go on while the next
round unpacks its numbers, into the very registers that they still read: with 64 rows and several programs to a
processor, results were wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from unspool.kernels.gpu.launching import LINE_BYTES, ask_for, launch, launch_options, let_next_start, wait_for_input
from unspool.kernels.gpu.products.activations import NONE, activate
from unspool.kernels.gpu.products.arranging import GROUP, find_run
from unspool.kernels.gpu.products.unpacking import part_tile, read_factors, unpack
from unspool.kernels.gpu.products.word_parts import arrange_groups, find_place, half_of
from unspool.kernels.gpu.products.words import Words


@dataclass(frozen=True, slots=True)
class RowsTiling:
    """How a product of several rows is cut: rows, outputs and columns (or words) at a time, parts of the columns."""

    rows: int
    outputs: int
    columns: int
    splits: int
    warps: int
    stages: int
    ahead: int = 4  # cache lines of every row of the matrix that are prefetched before the input is there
    is_early: bool = False  # on Hopper: whole tiles are copied before the input is there


@triton.jit
def _load(at, is_there, IS_EVEN: tl.constexpr):
    if IS_EVEN:
        found = tl.load(at)
    else:
        found = tl.load(at, mask=is_there, other=0)
    return found


@triton.jit
def _settle(total, HAS_ASM: tl.constexpr):
    """The same numbers; whoever reads them waits for the product that makes them."""
    if HAS_ASM:
        total = tl.inline_asm_elementwise("mov.f32 $0, $1;", "=f,f", [total], dtype=tl.float32, is_pure=True, pack=1)
    return total


@triton.jit(do_not_specialize=["R", "per_split"])
def _multiply_rows(
    W, FACTORS, X, BIAS, OUT, R, N, K, KW, KB, per_split,
    BITS: tl.constexpr, RUN: tl.constexpr, IS_FLOAT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BW: tl.constexpr,
    ACT: tl.constexpr, IS_GATED: tl.constexpr, ADDS: tl.constexpr, HAS_BIAS: tl.constexpr, IS_PART: tl.constexpr,
    IS_EVEN: tl.constexpr, ORDER: tl.constexpr, IS_WHOLE: tl.constexpr, LINES: tl.constexpr, LINE_BYTES: tl.constexpr,
    HAS_ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Outputs (rows, N), or a part's share of them: (parts, rows, N)."""
    IS_PACKED: tl.constexpr = BITS < 16
    IS_HALF: tl.constexpr = X.dtype.element_ty == tl.float16
    NUMBERS: tl.constexpr = 32 // BITS if IS_PACKED else 1  # of a word
    BLOCKS: tl.constexpr = BW // BITS if IS_PACKED else 1
    split = tl.program_id(1)
    rn = tl.program_id(0) * BN + tl.arange(0, BN)
    rm = tl.program_id(2) * BM + tl.arange(0, BM)
    word, block = tl.arange(0, BW), tl.arange(0, BLOCKS)
    # Outputs and rows beyond the last are computed as the last is, and not written: no load needs a mask for them.
    output = tl.minimum(rn, N - 1).to(tl.int64)[:, None]
    row = tl.minimum(rm, R - 1).to(tl.int64)[:, None]
    first = split * per_split * BW
    last = tl.minimum(first + per_split * BW, KW)
    at, beside = W + output * KW, N.to(tl.int64) * KW
    LINE: tl.constexpr = LINE_BYTES * 8 // W.dtype.element_ty.primitive_bitwidth
    line = first + tl.arange(0, LINES) * LINE
    ask_for(at + line[None, :], (line < last)[None, :] & (rn < N)[:, None], PDL)
    if IS_GATED:
        ask_for(at + beside + line[None, :], (line < last)[None, :] & (rn < N)[:, None], PDL)
    let_next_start(PDL)
    wait_for_input(PDL)
    at += word[None, :]
    factors_at, factors_beside = FACTORS + output * KB + block[None, :], N.to(tl.int64) * KB
    # Unpacked, more than 256 columns would not fit into registers: then four products share a tile of words.
    PARTS: tl.constexpr = 4 if IS_PACKED and BW * NUMBERS > 256 else 1
    WIDTH: tl.constexpr = BW * NUMBERS // PARTS  # columns of one product
    number = tl.arange(0, WIDTH)
    x_at = X + row * K + number[None, :]
    total = tl.zeros((BN, BM), tl.float32)
    other = tl.zeros((BN, BM), tl.float32)
    tl.assume(first < last)
    for start in tl.range(first, last, BW):
        is_word = ((start + word) < last)[None, :]
        is_block = (start // BITS + block < KB)[None, :]
        w = (_load(at + start, is_word, IS_EVEN),)
        v, f, g = w, (w, w), (w, w)
        if IS_GATED:
            v = (_load(at + beside + start, is_word, IS_EVEN),)
        if IS_PACKED and not IS_FLOAT:
            f = read_factors(_load(factors_at + start // BITS, is_block, IS_EVEN), BN, BW, BITS, IS_HALF, HAS_ASM)
            f = ((f[0],), (f[1],))
            if IS_GATED:
                at_value = factors_at + factors_beside + start // BITS
                g = read_factors(_load(at_value, is_block, IS_EVEN), BN, BW, BITS, IS_HALF, HAS_ASM)
                g = ((g[0],), (g[1],))
        if PARTS > 1:
            w, v = part_tile(w[0], BN, BW // PARTS), part_tile(v[0], BN, BW // PARTS)
            f = (part_tile(f[0][0], BN, BW // PARTS), part_tile(f[1][0], BN, BW // PARTS))
            if IS_GATED:
                g = (part_tile(g[0][0], BN, BW // PARTS), part_tile(g[1][0], BN, BW // PARTS))
        for part in tl.static_range(PARTS):
            numbers, values = w[part], v[part]
            if IS_PACKED:
                pair = (f[0][part], f[1][part])
                numbers = unpack(numbers, pair, BN, BW // PARTS, BITS, RUN, IS_FLOAT, IS_HALF, HAS_ASM)
                if IS_GATED:
                    pair = (g[0][part], g[1][part])
                    values = unpack(values, pair, BN, BW // PARTS, BITS, RUN, IS_FLOAT, IS_HALF, HAS_ASM)
            column = start * NUMBERS + part * WIDTH
            x = tl.trans(_load(x_at + column, (column + number < last * NUMBERS)[None, :], IS_EVEN))
            total = tl.dot(numbers.to(X.dtype.element_ty), x, total)
            if IS_GATED:
                other = tl.dot(values.to(X.dtype.element_ty), x, other)
        if IS_PACKED:
            total = _settle(total, HAS_ASM)
            if IS_GATED:
                other = _settle(other, HAS_ASM)
    is_there = (rn < N)[:, None] & (rm < R)[None, :]
    place = rn
    if ORDER > 0 and not IS_WHOLE:
        place = find_place(rn, N, ORDER)
    into = OUT + rm.to(tl.int64)[None, :] * N + place[:, None]
    if IS_FLOAT:
        total *= half_of(tl.load(FACTORS + rn, mask=rn < N, other=0), False)[:, None]
        if IS_GATED:
            other *= half_of(tl.load(FACTORS + N + rn, mask=rn < N, other=0), False)[:, None]
    y = total
    if IS_PART:
        into += split.to(tl.int64) * R * N
    else:
        if HAS_BIAS:
            y += tl.load(BIAS + rn, mask=rn < N, other=0.0).to(tl.float32)[:, None]
        y = activate(y, ACT)
        if IS_GATED:
            if HAS_BIAS:
                other += tl.load(BIAS + N + rn, mask=rn < N, other=0.0).to(tl.float32)[:, None]
            y *= other
        if ADDS:
            y += tl.load(into, mask=is_there, other=0.0).to(tl.float32)
    y = y.to(OUT.dtype.element_ty)
    if ORDER > 0 and IS_WHOLE:
        y = arrange_groups(y, BN, ORDER)
    tl.store(into, y, mask=is_there)


def multiply_rows(
    weight: torch.Tensor | Words,  # (outputs, inputs); gate above value if gated
    x: torch.Tensor,  # (rows, inputs), 16-bit floats; arranged for words
    out: torch.Tensor,  # (rows, outputs), half as many if gated; (splits, rows, outputs) float32 for parts
    tiling: RowsTiling,
    *,
    bias: torch.Tensor | None = None,
    activation: int = NONE,
    is_gated: bool = False,
    adds: bool = False,
    order: int = 0,
) -> None:
    """out = activation(weight @ x + bias), times the gated half; added to `out` if `adds`.

    With splits `out` gets the parts of weight @ x, for `add_parts`. With an `order` of 4 or 8 bits `out` is arranged.
    """
    if tiling.is_early:
        around: dict[str, Any] = {"bias": bias, "activation": activation, "is_gated": is_gated, "adds": adds}
        if isinstance(weight, Words):
            from unspool.kernels.gpu.products.early_words import multiply_early_words  # Gluon: not in every Triton

            tile = (tiling.rows, tiling.warps, tiling.stages)
            multiply_early_words(weight, x, out, tile, tiling.splits, order=order, **around)
        else:
            from unspool.kernels.gpu.products.early_product import multiply_early

            assert order == 0
            whole = (tiling.rows, tiling.outputs, tiling.columns, tiling.warps, tiling.stages)
            multiply_early(weight, x, out, whole, tiling.splits, **around)
        return
    matrix, factors = (weight.words, weight.factors) if isinstance(weight, Words) else (weight, weight)
    (_, inputs), outputs, width = weight.shape, out.shape[-1], matrix.shape[1]
    bits = weight.bits if isinstance(weight, Words) else 16
    run = find_run(inputs, bits) if bits < 16 else 1
    columns = min(tiling.columns, max(16, triton.next_power_of_2(width)))
    assert columns % (4 * run) == 0, "a tile has whole groups of runs"
    per_split = triton.cdiv(triton.cdiv(width, columns), tiling.splits)
    launch(
        _multiply_rows,
        (triton.cdiv(outputs, tiling.outputs), tiling.splits, triton.cdiv(x.shape[0], tiling.rows)),
        matrix,
        factors,
        x,
        bias if bias is not None else x,
        out,
        x.shape[0],
        outputs,
        inputs,
        width,
        factors.shape[1],
        per_split,
        BITS=bits,
        RUN=run,
        IS_FLOAT=isinstance(weight, Words) and weight.kind == "fp8",
        BM=tiling.rows,
        BN=tiling.outputs,
        BW=columns,
        ACT=activation,
        IS_GATED=is_gated,
        ADDS=adds,
        HAS_BIAS=bias is not None,
        IS_PART=out.dim() == 3,
        IS_EVEN=width % columns == 0,
        ORDER=order,
        IS_WHOLE=order > 0 and outputs % GROUP == 0 and tiling.outputs % GROUP == 0,
        LINES=tiling.ahead,
        LINE_BYTES=LINE_BYTES,
        HAS_ASM=x.is_cuda,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        **launch_options(),
    )
