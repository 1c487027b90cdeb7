"""Blocks of 4-bit numbers times an input that is rounded to 8 bits block by block, as the CPU's library rounds it.

Whole numbers are multiplied, four at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from unspool.kernels.gpu.products.word_parts import part_words


@triton.jit
def _join_bytes(first, second, third, fourth, HAS_ASM: tl.constexpr):
    """Four float32, rounded, as the signed bytes of a word."""
    if HAS_ASM:
        found = tl.inline_asm_elementwise(
            """{
            .reg .s32 a, b, c, d;
            cvt.rni.s32.f32 a, $1;
            cvt.rni.s32.f32 b, $2;
            cvt.rni.s32.f32 c, $3;
            cvt.rni.s32.f32 d, $4;
            cvt.pack.sat.s8.s32.b32 c, d, c, 0;
            cvt.pack.sat.s8.s32.b32 $0, b, a, c;
            }""",
            "=r,f,f,f,f", [first, second, third, fourth], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        found = (tl.floor(first + 0.5).to(tl.int32) & 255) | ((tl.floor(second + 0.5).to(tl.int32) & 255) << 8)
        found |= ((tl.floor(third + 0.5).to(tl.int32) & 255) << 16) | (tl.floor(fourth + 0.5).to(tl.int32) << 24)
    return found


@triton.jit
def _byte_of(word, PLACE: tl.constexpr):
    """A signed byte of a word."""
    return (word << (24 - 8 * PLACE)) >> 24


@triton.jit
def _add_bytes(word, total, HAS_ASM: tl.constexpr):
    """The sum of words' signed bytes, added to another sum."""
    if HAS_ASM:
        found = tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, 0x01010101, $2;", "=r,r,r", [word, total], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        found = total + _byte_of(word, 0) + _byte_of(word, 1) + _byte_of(word, 2) + _byte_of(word, 3)
    return found


@triton.jit
def multiply_bytes(w, x, HAS_ASM: tl.constexpr):
    """The dot products of blocks with their signed bytes: int32."""
    if HAS_ASM:
        found = tl.inline_asm_elementwise(
            """{
            .reg .b32 p, q, t;
            .reg .s32 u, v;
            and.b32 p, $1, 0x0F0F0F0F;
            shr.u32 t, $1, 4;
            and.b32 q, t, 0x0F0F0F0F;
            dp4a.u32.s32 u, p, $5, 0;
            dp4a.u32.s32 v, q, $6, 0;
            and.b32 p, $2, 0x0F0F0F0F;
            shr.u32 t, $2, 4;
            and.b32 q, t, 0x0F0F0F0F;
            dp4a.u32.s32 u, p, $7, u;
            dp4a.u32.s32 v, q, $8, v;
            and.b32 p, $3, 0x0F0F0F0F;
            shr.u32 t, $3, 4;
            and.b32 q, t, 0x0F0F0F0F;
            dp4a.u32.s32 u, p, $9, u;
            dp4a.u32.s32 v, q, $10, v;
            and.b32 p, $4, 0x0F0F0F0F;
            shr.u32 t, $4, 4;
            and.b32 q, t, 0x0F0F0F0F;
            dp4a.u32.s32 u, p, $11, u;
            dp4a.u32.s32 v, q, $12, v;
            add.s32 $0, u, v;
            }""",
            "=r,r,r,r,r,r,r,r,r,r,r,r,r",
            [
                w[0], w[1], w[2], w[3],
                x[0][0], x[1][0], x[0][1], x[1][1], x[0][2], x[1][2], x[0][3], x[1][3],
            ],
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        found = tl.zeros((1, 1), tl.int32)
        for word in tl.static_range(4):
            for place in tl.static_range(4):
                found += ((w[word] >> (8 * place)) & 15) * _byte_of(x[0][word], place)
                found += ((w[word] >> (8 * place + 4)) & 15) * _byte_of(x[1][word], place)
    return found


@triton.jit
def round_input(xs, BW: tl.constexpr, HAS_ASM: tl.constexpr):
    """Blocks of the input as signed bytes in words; their scales, and the blocks' sums.

    A NaN makes its whole block NaN.
    """
    BLOCKS: tl.constexpr = BW // 4
    ALL: tl.constexpr = tl.PropagateNan.ALL
    top = tl.zeros((BW,), tl.float32)
    for i in tl.static_range(8):
        top = tl.maximum(top, tl.abs(xs[i]), propagate_nan=ALL)
    a, b, c, d = part_words(top[None, :], 1, BLOCKS)
    tops = tl.maximum(tl.maximum(a, b, propagate_nan=ALL), tl.maximum(c, d, propagate_nan=ALL), propagate_nan=ALL)
    tops = tl.reshape(tops, (BLOCKS,))
    inverse = 127.0 / tl.maximum(tops, 1e-30)
    spread = tl.reshape(tl.broadcast_to(inverse[:, None], (BLOCKS, 4)), (BW,))
    whole = tl.zeros((BW,), tl.int32)
    parted = ()
    for i in tl.static_range(2):
        joined = _join_bytes(xs[i] * spread, xs[i + 2] * spread, xs[i + 4] * spread, xs[i + 6] * spread, HAS_ASM)
        whole = _add_bytes(joined, whole, HAS_ASM)
        parted = parted + (part_words(joined[None, :], 1, BLOCKS),)
    return parted, tops / 127.0, tl.sum(tl.reshape(whole, (BLOCKS, 4)), 1).to(tl.float32)
