"""Experts in MXFP4, one token at a time: blocks of 4-bit floats times an input in float16, two to a register.

The reference is `kernels.mx.MxWords.dequantise` and `F.linear`. The four bits of a number become a float16 by shifts
and masks alone, 2 ** 14 times too small; the input is divided by a power of two block by block, so that products of
both stay in a float16's range.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl

from unspool.kernels.gpu.experts.gates import join_gate
from unspool.kernels.gpu.experts.routing import Routes
from unspool.kernels.gpu.launching import launch, launch_options, let_next_start, wait_for_input
from unspool.kernels.gpu.products.half_blocks import join_halves
from unspool.kernels.gpu.products.word_parts import half_of, part_words
from unspool.kernels.mx import MxWords

_RAISED = tl.constexpr(4096.0)  # the input's factor; with the numbers' 2 ** -14 products are a quarter of what they are


@dataclass(frozen=True, slots=True)
class FourTiling:
    """How a matrix is cut: rows and words of each at a time, tiles per program, and its warps."""

    rows: int
    words: int
    tiles: int
    warps: int


USUAL_UP: Final = FourTiling(8, 128, 4, 4)
USUAL_DOWN: Final = FourTiling(8, 128, 4, 4)


@triton.jit
def _read_four(word, PLACE: tl.constexpr, HALF: tl.constexpr):
    """One number of a word, divided by 2 ** 14: what the instructions below make, for the interpreter."""
    SIZE_AT: tl.constexpr = 16 * HALF + 9 - 3 * PLACE
    SIGN_AT: tl.constexpr = 16 * HALF + (15 if PLACE == 0 else 12 if PLACE == 1 else 16 - PLACE)
    size, sign = (word >> SIZE_AT) & 7, (word >> SIGN_AT) & 1
    exponent, mantissa = (size >> 1).to(tl.float32), (size & 1).to(tl.float32)
    value = tl.where(exponent == 0.0, 0.5 * mantissa, (1.0 + 0.5 * mantissa) * tl.exp2(exponent - 1.0))
    return tl.where(sign == 1, -value, value) / 16384.0


@triton.jit
def multiply_fours(w, x, HAS_ASM: tl.constexpr):
    """The dot products of blocks with their halves, a quarter of what they are: float32."""
    if HAS_ASM:
        found = tl.inline_asm_elementwise(
            """{
            .reg .b32 p, q, r, s, t, u, v;
            .reg .b16 lo, hi;
            .reg .f32 f, g;
            and.b32 p, $1, 0x8E008E00;
            shl.b32 t, $1, 3;
            and.b32 q, t, 0x8E008E00;
            shl.b32 t, $1, 6;
            and.b32 r, t, 0x0E000E00;
            shl.b32 t, $1, 1;
            lop3.b32 r, t, 0x80008000, r, 0xEA;
            shl.b32 t, $1, 9;
            and.b32 s, t, 0x0E000E00;
            shl.b32 t, $1, 2;
            lop3.b32 s, t, 0x80008000, s, 0xEA;
            mul.rn.f16x2 u, p, $5;
            fma.rn.f16x2 u, q, $6, u;
            fma.rn.f16x2 u, r, $7, u;
            fma.rn.f16x2 u, s, $8, u;
            and.b32 p, $2, 0x8E008E00;
            shl.b32 t, $2, 3;
            and.b32 q, t, 0x8E008E00;
            shl.b32 t, $2, 6;
            and.b32 r, t, 0x0E000E00;
            shl.b32 t, $2, 1;
            lop3.b32 r, t, 0x80008000, r, 0xEA;
            shl.b32 t, $2, 9;
            and.b32 s, t, 0x0E000E00;
            shl.b32 t, $2, 2;
            lop3.b32 s, t, 0x80008000, s, 0xEA;
            fma.rn.f16x2 u, p, $9, u;
            fma.rn.f16x2 u, q, $10, u;
            fma.rn.f16x2 u, r, $11, u;
            fma.rn.f16x2 u, s, $12, u;
            and.b32 p, $3, 0x8E008E00;
            shl.b32 t, $3, 3;
            and.b32 q, t, 0x8E008E00;
            shl.b32 t, $3, 6;
            and.b32 r, t, 0x0E000E00;
            shl.b32 t, $3, 1;
            lop3.b32 r, t, 0x80008000, r, 0xEA;
            shl.b32 t, $3, 9;
            and.b32 s, t, 0x0E000E00;
            shl.b32 t, $3, 2;
            lop3.b32 s, t, 0x80008000, s, 0xEA;
            mul.rn.f16x2 v, p, $13;
            fma.rn.f16x2 v, q, $14, v;
            fma.rn.f16x2 v, r, $15, v;
            fma.rn.f16x2 v, s, $16, v;
            and.b32 p, $4, 0x8E008E00;
            shl.b32 t, $4, 3;
            and.b32 q, t, 0x8E008E00;
            shl.b32 t, $4, 6;
            and.b32 r, t, 0x0E000E00;
            shl.b32 t, $4, 1;
            lop3.b32 r, t, 0x80008000, r, 0xEA;
            shl.b32 t, $4, 9;
            and.b32 s, t, 0x0E000E00;
            shl.b32 t, $4, 2;
            lop3.b32 s, t, 0x80008000, s, 0xEA;
            fma.rn.f16x2 v, p, $17, v;
            fma.rn.f16x2 v, q, $18, v;
            fma.rn.f16x2 v, r, $19, v;
            fma.rn.f16x2 v, s, $20, v;
            add.rn.f16x2 u, u, v;
            mov.b32 {lo, hi}, u;
            cvt.f32.f16 f, lo;
            cvt.f32.f16 g, hi;
            add.f32 $0, f, g;
            }""",
            "=f,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
            [
                w[0], w[1], w[2], w[3],
                x[0][0], x[1][0], x[2][0], x[3][0], x[0][1], x[1][1], x[2][1], x[3][1],
                x[0][2], x[1][2], x[2][2], x[3][2], x[0][3], x[1][3], x[2][3], x[3][3],
            ],
            dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        found = tl.zeros((1, 1), tl.float32)
        for word in tl.static_range(4):
            for place in tl.static_range(4):
                found += _read_four(w[word], place, 0) * half_of(x[place][word], False)
                found += _read_four(w[word], place, 1) * half_of(x[place][word], True)
    return found


@triton.jit
def _raise_input(xs, BW: tl.constexpr, HAS_ASM: tl.constexpr):
    """Blocks of the input divided by the power of two of their maximum and raised, in words; and those powers."""
    BLOCKS: tl.constexpr = BW // 4
    top = tl.zeros((BW,), tl.float32)
    for i in tl.static_range(8):
        top = tl.maximum(top, tl.abs(xs[i]))
    tops = tl.max(tl.reshape(top, (BLOCKS, 4)), 1)
    bits = tl.maximum(tops.to(tl.int32, bitcast=True) & 0x7F800000, 0x10000000)  # of nothing too: a small power
    inverse = (0x7F000000 - bits).to(tl.float32, bitcast=True)
    spread = tl.reshape(tl.broadcast_to((inverse * _RAISED)[:, None], (BLOCKS, 4)), (BW,))
    parted = ()
    for i in tl.static_range(4):
        pairs = join_halves(xs[i] * spread, xs[i + 4] * spread, HAS_ASM)
        parted = parted + (part_words(pairs[None, :], 1, BLOCKS),)
    return parted, bits.to(tl.float32, bitcast=True)


@triton.jit
def _read_power(exponents):
    """The powers of two that blocks share."""
    return (exponents.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _multiply_experts(
    W, SCALES, X, CHOSEN, BIAS, Y, limit, gain, N,
    K: tl.constexpr, BN: tl.constexpr, BW: tl.constexpr, TILES: tl.constexpr, SHARE: tl.constexpr,
    ACT: tl.constexpr, IS_GATED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_LIMIT: tl.constexpr,
    IS_ROUTED: tl.constexpr, HAS_ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Outputs (pairs, N) of one pair of a token and an expert; input rows are a pair's number divided by SHARE."""
    BLOCKS: tl.constexpr = BW // 4
    KW: tl.constexpr = K // 8
    KB: tl.constexpr = K // 32
    CHUNKS: tl.constexpr = (KW + BW - 1) // BW
    pair = tl.program_id(1)
    place, word, block = tl.arange(0, BN), tl.arange(0, BW), tl.arange(0, BLOCKS)
    rn = tl.program_id(0) * (BN * TILES) + place
    column = word // 4 * 32 + word % 4  # of a word's first number; the next ones are 4 further each
    if not IS_ROUTED:
        wait_for_input(PDL)
    expert = tl.load(CHOSEN + pair).to(tl.int64)
    if not IS_ROUTED:
        let_next_start(PDL)
    first = expert * N
    if IS_GATED:
        first = expert * (2 * N)
    at = W + (first + rn)[:, None] * KW + word[None, :]
    scales_at = SCALES + (first + rn)[:, None] * KB + block[None, :]
    beside, scales_beside = N.to(tl.int64) * KW, N.to(tl.int64) * KB  # offset of the gated half
    words, scales, others, other_scales = (), (), (), ()
    for c in tl.static_range(CHUNKS):
        is_word = (rn < N)[:, None] & (c * BW + word < KW)[None, :]
        is_block = (rn < N)[:, None] & (c * BLOCKS + block < KB)[None, :]
        w = tl.load(at + c * BW, mask=is_word, other=0, eviction_policy="evict_first")
        f = tl.load(scales_at + c * BLOCKS, mask=is_block, other=0, eviction_policy="evict_first")
        words, scales = words + (w,), scales + (f,)
        if IS_GATED:
            w = tl.load(at + beside + c * BW, mask=is_word, other=0, eviction_policy="evict_first")
            f = tl.load(scales_at + scales_beside + c * BLOCKS, mask=is_block, other=0, eviction_policy="evict_first")
        others, other_scales = others + (w,), other_scales + (f,)
    if IS_ROUTED:
        let_next_start(PDL)
        wait_for_input(PDL)
    inputs = ()
    for c in tl.static_range(CHUNKS):
        xs = ()
        for i in tl.static_range(8):
            here = X + (pair // SHARE).to(tl.int64) * K + c * BW * 8 + column + i * 4
            xs = xs + (tl.load(here, mask=c * BW + word < KW, other=0.0).to(tl.float32),)
        inputs = inputs + (_raise_input(xs, BW, HAS_ASM),)
    for tile in tl.range(TILES):
        part = tl.zeros((BN, BLOCKS), tl.float32)
        other = part
        is_more = (rn + BN < N) & (tile + 1 < TILES)
        step = (tile + 1) * BN
        so_far = (words, scales, others, other_scales)
        words, scales, others, other_scales = (), (), (), ()
        for c in tl.static_range(CHUNKS):
            parted, power = inputs[c]
            is_word = is_more[:, None] & (c * BW + word < KW)[None, :]
            is_block = is_more[:, None] & (c * BLOCKS + block < KB)[None, :]
            next_at = at + step * KW + c * BW
            next_scales = scales_at + step * KB + c * BLOCKS
            w = tl.load(next_at, mask=is_word, other=0, eviction_policy="evict_first")
            f = tl.load(next_scales, mask=is_block, other=0, eviction_policy="evict_first")
            words, scales = words + (w,), scales + (f,)
            scale = _read_power(so_far[1][c]) * power[None, :]
            part += multiply_fours(part_words(so_far[0][c], BN, BLOCKS), parted, HAS_ASM) * scale
            if IS_GATED:
                w = tl.load(next_at + beside, mask=is_word, other=0, eviction_policy="evict_first")
                f = tl.load(next_scales + scales_beside, mask=is_block, other=0, eviction_policy="evict_first")
                scale = _read_power(so_far[3][c]) * power[None, :]
                other += multiply_fours(part_words(so_far[2][c], BN, BLOCKS), parted, HAS_ASM) * scale
            others, other_scales = others + (w,), other_scales + (f,)
        y = 4.0 * tl.sum(part, 1)
        if HAS_BIAS:
            y += tl.load(BIAS + first + rn, mask=rn < N, other=0.0).to(tl.float32)
        if IS_GATED:
            z = 4.0 * tl.sum(other, 1)
            if HAS_BIAS:
                z += tl.load(BIAS + first + N + rn, mask=rn < N, other=0.0).to(tl.float32)
            y = join_gate(y, z, limit, gain, ACT, HAS_LIMIT)
        tl.store(Y + pair.to(tl.int64) * N + rn, y.to(Y.dtype.element_ty), mask=rn < N)
        rn += BN


def multiply_experts(
    weight: MxWords,  # (experts * outputs, inputs): gate above value in every expert's part if gated
    x: torch.Tensor,  # (pairs / share, inputs)
    routes: Routes,
    out: torch.Tensor,  # (pairs, outputs), half as many if gated
    tiling: FourTiling,
    *,
    share: int,  # pairs that read the same row of x
    bias: torch.Tensor | None = None,
    activation: int = 0,
    is_gated: bool = False,
    limit: float | None = None,
    gain: float = 1.0,
    is_routed: bool = False,  # the kernel before this one has waited for the routes
) -> None:
    """Every pair's row times the matrix of its expert."""
    pairs, outputs = out.shape
    launch(
        _multiply_experts,
        (triton.cdiv(outputs, tiling.rows * tiling.tiles), pairs),
        weight.words,
        weight.scales,
        x,
        routes.chosen,
        bias if bias is not None else x,
        out,
        limit or 0.0,
        gain,
        outputs,
        K=weight.shape[1],
        BN=tiling.rows,
        TILES=tiling.tiles,
        BW=min(tiling.words, max(16, triton.next_power_of_2(weight.words.shape[1]))),
        SHARE=share,
        ACT=activation,
        IS_GATED=is_gated,
        HAS_BIAS=bias is not None,
        HAS_LIMIT=limit is not None,
        IS_ROUTED=is_routed,
        HAS_ASM=x.is_cuda,
        num_warps=tiling.warps,
        **launch_options(),
    )
