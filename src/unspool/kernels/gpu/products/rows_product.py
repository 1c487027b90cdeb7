"""A matrix times several rows on the tensor cores; quantised numbers are unpacked in registers on the way there.

The reference is `Words.dequantise` and `F.linear`. A program computes some outputs of some rows. Where there are few
outputs the columns are split among programs, each of which writes what its columns add up to; `parts.add_parts` adds
these, with the residual and the norm that the next product needs anyway.

A word's numbers lie some columns apart. So each pair of places in the words makes a product of its own, with the
columns of the input that belong to it: the rows have been arranged for that (`arranging`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from unspool.kernels.gpu.launching import LINE_BYTES, ask_for, launch, launch_options, let_next_start, wait_for_input
from unspool.kernels.gpu.products.activations import NONE, activate
from unspool.kernels.gpu.products.word_parts import choose_byte, find_place, half_of
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


@triton.jit
def _join_twice(x, IS_HALF: tl.constexpr):
    """A number as both halves of a word, in float16 or bfloat16."""
    if IS_HALF:
        found = tl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $1, $1;", "=r,f", [x], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        found = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $1, $1;", "=r,f", [x], dtype=tl.int32, is_pure=True, pack=1
        )
    return found


@triton.jit
def _scale_nibbles(words, scale, least, IS_HALF: tl.constexpr):
    """The lowest four bits of both halves of words, minus 8, by their scale, and their least: halves again.

    Numbers are put into the mantissa of 128 (bfloat16) or 1024 (float16), which is subtracted.
    """
    if IS_HALF:
        found = tl.inline_asm_elementwise(
            """{
            .reg .b32 t, one, off;
            mov.b32 one, 0x3C003C00;
            mov.b32 off, 0xE408E408;
            lop3.b32 t, $1, 0x000F000F, 0x64006400, 0xEA;
            fma.rn.f16x2 t, t, one, off;
            fma.rn.f16x2 $0, t, $2, $3;
            }""",
            "=r,r,r,r", [words, scale, least], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        found = tl.inline_asm_elementwise(
            """{
            .reg .b32 t, one, off;
            mov.b32 one, 0x3F803F80;
            mov.b32 off, 0xC308C308;
            lop3.b32 t, $1, 0x000F000F, 0x43004300, 0xEA;
            fma.rn.bf16x2 t, t, one, off;
            fma.rn.bf16x2 $0, t, $2, $3;
            }""",
            "=r,r,r,r", [words, scale, least], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    return found


@triton.jit
def _spread(x, BN: tl.constexpr, BLOCKS: tl.constexpr, WORDS: tl.constexpr):
    """What blocks have (BN, BLOCKS), for each of their words: (BN, BLOCKS * WORDS)."""
    return tl.reshape(tl.broadcast_to(x[:, :, None], (BN, BLOCKS, WORDS)), (BN, BLOCKS * WORDS))


@triton.jit
def _read_factors(
    found, BN: tl.constexpr, BW: tl.constexpr, BITS: tl.constexpr, IS_HALF: tl.constexpr, HAS_ASM: tl.constexpr
):
    """The scale and the least of every word's block, as `_unpack` takes them."""
    BLOCKS: tl.constexpr = BW // BITS
    if BITS == 4:
        scale = half_of(found, False)
        least = half_of(found, True) + 8.0 * scale
        if HAS_ASM:
            scale, least = _join_twice(scale, IS_HALF), _join_twice(least, IS_HALF)
        factors = (_spread(scale, BN, BLOCKS, BITS), _spread(least, BN, BLOCKS, BITS))
    else:
        scale = _spread(found.to(tl.float16, bitcast=True).to(tl.float32), BN, BLOCKS, BITS)
        factors = (scale, scale)
    return factors


@triton.jit
def _unpack(
    words, factors, PLACE: tl.constexpr,
    BN: tl.constexpr, BW: tl.constexpr, BITS: tl.constexpr, IS_HALF: tl.constexpr, HAS_ASM: tl.constexpr,
):  # fmt: skip
    """Two numbers of every word, those at PLACE and those half a word further, side by side: (BN, 2 * BW)."""
    if BITS == 4:
        if HAS_ASM:
            pairs = _scale_nibbles(words >> (4 * PLACE), factors[0], factors[1], IS_HALF)
            low, high = pairs.to(tl.int16), (pairs >> 16).to(tl.int16)
            if IS_HALF:
                low, high = low.to(tl.float16, bitcast=True), high.to(tl.float16, bitcast=True)
            else:
                low, high = low.to(tl.bfloat16, bitcast=True), high.to(tl.bfloat16, bitcast=True)
        else:
            low = (((words >> (4 * PLACE)) & 15).to(tl.float32) - 8.0) * factors[0] + factors[1]
            high = (((words >> (4 * PLACE + 16)) & 15).to(tl.float32) - 8.0) * factors[0] + factors[1]
    else:
        low = (choose_byte(words, PLACE, HAS_ASM) - 32896.0) * factors[0]
        high = (choose_byte(words, PLACE + 2, HAS_ASM) - 32896.0) * factors[0]
    return tl.reshape(tl.join(low, high), (BN, 2 * BW))


@triton.jit
def _load(at, is_there, IS_EVEN: tl.constexpr):
    if IS_EVEN:
        found = tl.load(at)
    else:
        found = tl.load(at, mask=is_there, other=0)
    return found


@triton.jit(do_not_specialize=["R", "per_split"])
def _multiply_rows(
    W, FACTORS, X, BIAS, OUT, R, N, K, KW, KB, per_split,
    BITS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BW: tl.constexpr, ACT: tl.constexpr,
    IS_GATED: tl.constexpr, ADDS: tl.constexpr, HAS_BIAS: tl.constexpr, IS_PART: tl.constexpr, IS_EVEN: tl.constexpr,
    ORDER: tl.constexpr, LINES: tl.constexpr, LINE_BYTES: tl.constexpr, HAS_ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Outputs (rows, N), or a part's share of them: (parts, rows, N)."""
    IS_PACKED: tl.constexpr = BITS < 16
    IS_HALF: tl.constexpr = X.dtype.element_ty == tl.float16
    NUMBERS: tl.constexpr = 32 // BITS if IS_PACKED else 1  # of a word
    PLACES: tl.constexpr = NUMBERS // 2 if IS_PACKED else 1
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
    WIDTH: tl.constexpr = 2 * BW if IS_PACKED else BW  # columns of one product
    number = tl.arange(0, WIDTH)
    x_at = X + row * K + number[None, :]
    total = tl.zeros((BN, BM), tl.float32)
    other = tl.zeros((BN, BM), tl.float32)
    for start in tl.range(first, last, BW):
        is_word = ((start + word) < last)[None, :]
        is_block = (start // BITS + block < KB)[None, :]
        w = _load(at + start, is_word, IS_EVEN)
        v = w
        if IS_GATED:
            v = _load(at + beside + start, is_word, IS_EVEN)
        if IS_PACKED:
            f = _load(factors_at + start // BITS, is_block, IS_EVEN)
            factors = _read_factors(f, BN, BW, BITS, IS_HALF, HAS_ASM)
            factors_of_value = factors
            if IS_GATED:
                g = _load(factors_at + factors_beside + start // BITS, is_block, IS_EVEN)
                factors_of_value = _read_factors(g, BN, BW, BITS, IS_HALF, HAS_ASM)
        for place in tl.static_range(PLACES):
            numbers, values = w, v
            here = x_at + start
            is_number = (start + number < last)[None, :]
            if IS_PACKED:
                here = x_at + place * (2 * KW) + 2 * start
                is_number = (2 * start + number < 2 * last)[None, :]
                numbers = _unpack(w, factors, place, BN, BW, BITS, IS_HALF, HAS_ASM)
                if IS_GATED:
                    values = _unpack(v, factors_of_value, place, BN, BW, BITS, IS_HALF, HAS_ASM)
            x = tl.trans(_load(here, is_number, IS_EVEN))
            total = tl.dot(numbers.to(X.dtype.element_ty), x, total)
            if IS_GATED:
                other = tl.dot(values.to(X.dtype.element_ty), x, other)
    is_there = (rn < N)[:, None] & (rm < R)[None, :]
    into = OUT + rm.to(tl.int64)[None, :] * N + find_place(rn, N, ORDER)[:, None]
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
    tl.store(into, y.to(OUT.dtype.element_ty), mask=is_there)


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
    matrix, factors = (weight.words, weight.factors) if isinstance(weight, Words) else (weight, weight)
    (_, inputs), outputs, width = weight.shape, out.shape[-1], matrix.shape[1]
    columns = min(tiling.columns, max(16, triton.next_power_of_2(width)))
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
        BITS=weight.bits if isinstance(weight, Words) else 16,
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
        LINES=tiling.ahead,
        LINE_BYTES=LINE_BYTES,
        HAS_ASM=x.is_cuda,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        **launch_options(),
    )
