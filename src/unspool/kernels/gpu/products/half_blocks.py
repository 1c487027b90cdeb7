"""Blocks of 4-bit numbers times an input in float16, two to a register.

Each block of the input is divided by a power of two, so that small numbers lose no precision.
"""

from __future__ import annotations

import triton
import triton.language as tl

from unspool.kernels.gpu.products.word_parts import half_of, part_words


@triton.jit
def join_halves(low, high, HAS_ASM: tl.constexpr):
    """Two float32 as the halves of a word."""
    if HAS_ASM:
        found = tl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        first = low.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        found = first | (high.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) << 16)
    return found


@triton.jit
def multiply_halves(w, x, HAS_ASM: tl.constexpr):
    """The dot products of blocks, minus 8 each, with their halves: float32.

    Numbers are put into the mantissa of 1024, or 16 times as large, and the excess is subtracted. A block is added up
    in two chains of eight products each.
    """
    if HAS_ASM:
        found = tl.inline_asm_elementwise(
            """{
            .reg .b32 p, q, r, s, t, u, v, one, off, part, less;
            .reg .b16 lo, hi;
            .reg .f32 f, g;
            mov.b32 one, 0x3C003C00;
            mov.b32 off, 0xE408E408;
            mov.b32 part, 0x2C002C00;
            mov.b32 less, 0xD480D480;
            shr.u32 t, $1, 8;
            lop3.b32 p, $1, 0x000F000F, 0x64006400, 0xEA;
            lop3.b32 q, $1, 0x00F000F0, 0x64006400, 0xEA;
            lop3.b32 r, t, 0x000F000F, 0x64006400, 0xEA;
            lop3.b32 s, t, 0x00F000F0, 0x64006400, 0xEA;
            fma.rn.f16x2 p, p, one, off;
            fma.rn.f16x2 q, q, part, less;
            fma.rn.f16x2 r, r, one, off;
            fma.rn.f16x2 s, s, part, less;
            mul.rn.f16x2 u, p, $5;
            fma.rn.f16x2 u, q, $6, u;
            fma.rn.f16x2 u, r, $7, u;
            fma.rn.f16x2 u, s, $8, u;
            shr.u32 t, $2, 8;
            lop3.b32 p, $2, 0x000F000F, 0x64006400, 0xEA;
            lop3.b32 q, $2, 0x00F000F0, 0x64006400, 0xEA;
            lop3.b32 r, t, 0x000F000F, 0x64006400, 0xEA;
            lop3.b32 s, t, 0x00F000F0, 0x64006400, 0xEA;
            fma.rn.f16x2 p, p, one, off;
            fma.rn.f16x2 q, q, part, less;
            fma.rn.f16x2 r, r, one, off;
            fma.rn.f16x2 s, s, part, less;
            fma.rn.f16x2 u, p, $9, u;
            fma.rn.f16x2 u, q, $10, u;
            fma.rn.f16x2 u, r, $11, u;
            fma.rn.f16x2 u, s, $12, u;
            shr.u32 t, $3, 8;
            lop3.b32 p, $3, 0x000F000F, 0x64006400, 0xEA;
            lop3.b32 q, $3, 0x00F000F0, 0x64006400, 0xEA;
            lop3.b32 r, t, 0x000F000F, 0x64006400, 0xEA;
            lop3.b32 s, t, 0x00F000F0, 0x64006400, 0xEA;
            fma.rn.f16x2 p, p, one, off;
            fma.rn.f16x2 q, q, part, less;
            fma.rn.f16x2 r, r, one, off;
            fma.rn.f16x2 s, s, part, less;
            mul.rn.f16x2 v, p, $13;
            fma.rn.f16x2 v, q, $14, v;
            fma.rn.f16x2 v, r, $15, v;
            fma.rn.f16x2 v, s, $16, v;
            shr.u32 t, $4, 8;
            lop3.b32 p, $4, 0x000F000F, 0x64006400, 0xEA;
            lop3.b32 q, $4, 0x00F000F0, 0x64006400, 0xEA;
            lop3.b32 r, t, 0x000F000F, 0x64006400, 0xEA;
            lop3.b32 s, t, 0x00F000F0, 0x64006400, 0xEA;
            fma.rn.f16x2 p, p, one, off;
            fma.rn.f16x2 q, q, part, less;
            fma.rn.f16x2 r, r, one, off;
            fma.rn.f16x2 s, s, part, less;
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
            for pair in tl.static_range(4):
                numbers = w[word] >> (4 * pair)
                found += ((numbers & 15).to(tl.float32) - 8.0) * half_of(x[pair][word], False)
                found += (((numbers >> 16) & 15).to(tl.float32) - 8.0) * half_of(x[pair][word], True)
    return found


@triton.jit
def halve_input(xs, BW: tl.constexpr, HAS_ASM: tl.constexpr):
    """Blocks of the input divided by the power of two of their maximum, in words; those powers, and their sums."""
    BLOCKS: tl.constexpr = BW // 4
    top, whole = tl.zeros((BW,), tl.float32), tl.zeros((BW,), tl.float32)
    for i in tl.static_range(8):
        top, whole = tl.maximum(top, tl.abs(xs[i])), whole + xs[i]
    tops = tl.max(tl.reshape(top, (BLOCKS, 4)), 1)
    bits = tops.to(tl.int32, bitcast=True) & 0x7F800000
    inverse = tl.minimum(0x7F000000 - bits, 0x7F000000).to(tl.float32, bitcast=True)
    spread = tl.reshape(tl.broadcast_to(inverse[:, None], (BLOCKS, 4)), (BW,))
    parted = ()
    for i in tl.static_range(4):
        pairs = join_halves(xs[i] * spread, xs[i + 4] * spread, HAS_ASM)
        parted = parted + (part_words(pairs[None, :], 1, BLOCKS),)
    return parted, bits.to(tl.float32, bitcast=True), tl.sum(tl.reshape(whole, (BLOCKS, 4)), 1)
