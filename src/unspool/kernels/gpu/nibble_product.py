"""A matrix of 4-bit words times one row: the input stays in registers while several tiles of rows go by.

The reference is `Words.dequantise` and `F.linear`. A word's numbers are never widened one by one. Either they and the
input are halves, two to a register (blocks of the input over a power of two, so that nothing is lost by small
numbers), or the input is rounded to 8 bits block by block, as the CPU's library does, and whole numbers are
multiplied, four at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Unpack

import torch
import triton
import triton.language as tl

from unspool.kernels.gpu.launching import let_next_start, wait_for_input
from unspool.kernels.gpu.result import Around, launch_product, load_held, write_result
from unspool.kernels.gpu.words import Words

MOST_CHUNKS: Final = 8  # of words of a row: all of the input is held in registers


@dataclass(frozen=True, slots=True)
class NibbleTiling:
    """How the matrix is cut: rows and words of each at a time, tiles a program, and its warps."""

    rows: int
    words: int
    tiles: int
    warps: int


@triton.jit
def _half_of(pair, IS_HIGH: tl.constexpr):
    """A word's low or high half as float32."""
    return (pair >> (16 if IS_HIGH else 0)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _part_words(words, ROWS: tl.constexpr, BLOCKS: tl.constexpr):
    """What belongs to the four words of blocks (ROWS, 4 * BLOCKS) as four tensors."""
    even, odd = tl.split(tl.reshape(words, (ROWS, BLOCKS, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


# --- halves -----------------------------------------------------------------------------------------------


@triton.jit
def _join_halves(low, high, HAS_ASM: tl.constexpr):
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
def _multiply_halves(w, x, HAS_ASM: tl.constexpr):
    """The sum of blocks' numbers, less 8 each, times the halves that belong to them: float32.

    Numbers stand in the mantissa of 1024, or 16 times as large; what that adds is taken off. A block is added up in two
    chains of eight products each.
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
                found += ((numbers & 15).to(tl.float32) - 8.0) * _half_of(x[pair][word], False)
                found += (((numbers >> 16) & 15).to(tl.float32) - 8.0) * _half_of(x[pair][word], True)
    return found


@triton.jit
def _halve_input(xs, BW: tl.constexpr, HAS_ASM: tl.constexpr):
    """Blocks of the input over the power of two of their greatest, in words; those powers, and the blocks' sums."""
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
        pairs = _join_halves(xs[i] * spread, xs[i + 4] * spread, HAS_ASM)
        parted = parted + (_part_words(pairs[None, :], 1, BLOCKS),)
    return parted, bits.to(tl.float32, bitcast=True), tl.sum(tl.reshape(whole, (BLOCKS, 4)), 1)


# --- bytes ------------------------------------------------------------------------------------------------


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
    """The sum of words' signed bytes, on top of another."""
    if HAS_ASM:
        found = tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, 0x01010101, $2;", "=r,r,r", [word, total], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        found = total + _byte_of(word, 0) + _byte_of(word, 1) + _byte_of(word, 2) + _byte_of(word, 3)
    return found


@triton.jit
def _multiply_bytes(w, x, HAS_ASM: tl.constexpr):
    """The sum of blocks' numbers times the signed bytes that belong to them: int32."""
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
def _round_input(xs, BW: tl.constexpr, HAS_ASM: tl.constexpr):
    """Blocks of the input as signed bytes in words; what one of them counts, and the blocks' sums.

    A number that is none makes all of its block none.
    """
    BLOCKS: tl.constexpr = BW // 4
    ALL: tl.constexpr = tl.PropagateNan.ALL
    top = tl.zeros((BW,), tl.float32)
    for i in tl.static_range(8):
        top = tl.maximum(top, tl.abs(xs[i]), propagate_nan=ALL)
    a, b, c, d = _part_words(top[None, :], 1, BLOCKS)
    tops = tl.maximum(tl.maximum(a, b, propagate_nan=ALL), tl.maximum(c, d, propagate_nan=ALL), propagate_nan=ALL)
    tops = tl.reshape(tops, (BLOCKS,))
    inverse = 127.0 / tl.maximum(tops, 1e-30)
    spread = tl.reshape(tl.broadcast_to(inverse[:, None], (BLOCKS, 4)), (BW,))
    whole = tl.zeros((BW,), tl.int32)
    parted = ()
    for i in tl.static_range(2):
        joined = _join_bytes(xs[i] * spread, xs[i + 2] * spread, xs[i + 4] * spread, xs[i + 6] * spread, HAS_ASM)
        whole = _add_bytes(joined, whole, HAS_ASM)
        parted = parted + (_part_words(joined[None, :], 1, BLOCKS),)
    return parted, tops / 127.0, tl.sum(tl.reshape(whole, (BLOCKS, 4)), 1).to(tl.float32)


# --- the product ------------------------------------------------------------------------------------------


@triton.jit
def _multiply_blocks(
    words, factors, x, power, sums,
    BN: tl.constexpr, BW: tl.constexpr, ROUNDS: tl.constexpr, HAS_ASM: tl.constexpr,
):  # fmt: skip
    """The products of blocks (BN, BLOCKS): numbers times input, by the scale, and the minimum times the input's sum."""
    parted = _part_words(words, BN, BW // 4)
    scale, least = _half_of(factors, False), _half_of(factors, True)
    if ROUNDS:
        total = _multiply_bytes(parted, x, HAS_ASM).to(tl.float32)
        found = (total * scale + least * sums[None, :]) * power[None, :]
    else:
        total = _multiply_halves(parted, x, HAS_ASM)
        found = total * (scale * power[None, :]) + (least + 8.0 * scale) * sums[None, :]
    return found


@triton.jit(do_not_specialize=["num_tiles"])
def _multiply_nibbles(
    W, FACTORS, X, NORM, BIAS, Y, eps, N, num_tiles,
    K: tl.constexpr, BN: tl.constexpr, BW: tl.constexpr, ROUNDS: tl.constexpr,
    ACT: tl.constexpr, IS_GATED: tl.constexpr, ADDS: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = BW // 4
    KW: tl.constexpr = K // 8
    KB: tl.constexpr = K // 32
    CHUNKS: tl.constexpr = (KW + BW - 1) // BW
    place, word, block = tl.arange(0, BN), tl.arange(0, BW), tl.arange(0, BLOCKS)
    rn = tl.program_id(0) * (BN * num_tiles) + place
    at = W + rn.to(tl.int64)[:, None] * KW + word[None, :]
    factors_at = FACTORS + rn.to(tl.int64)[:, None] * KB + block[None, :]
    beside, factors_beside = N.to(tl.int64) * KW, N.to(tl.int64) * KB  # where the gated half lies
    words, factors, others, other_factors = (), (), (), ()
    for c in tl.static_range(CHUNKS):
        is_word = (rn < N)[:, None] & (c * BW + word < KW)[None, :]
        is_block = (rn < N)[:, None] & (c * BLOCKS + block < KB)[None, :]
        w = tl.load(at + c * BW, mask=is_word, other=0, eviction_policy="evict_first")
        f = tl.load(factors_at + c * BLOCKS, mask=is_block, other=0, eviction_policy="evict_first")
        words, factors = words + (w,), factors + (f,)
        if IS_GATED:
            w = tl.load(at + beside + c * BW, mask=is_word, other=0, eviction_policy="evict_first")
            f = tl.load(factors_at + factors_beside + c * BLOCKS, mask=is_block, other=0, eviction_policy="evict_first")
        others, other_factors = others + (w,), other_factors + (f,)
    column = word // 4 * 32 + word % 4  # of a word's first number; the next ones are 4 further each
    norms = ()
    for c in tl.static_range(CHUNKS):
        for i in tl.static_range(8):
            norm = column
            if HAS_NORM:
                norm = tl.load(NORM + c * BW * 8 + column + i * 4, mask=c * BW + word < KW, other=0.0)
            norms = norms + (norm,)
    let_next_start(PDL)
    wait_for_input(PDL)
    # --- the input
    squares = tl.zeros((BW,), tl.float32)
    inputs = ()
    for c in tl.static_range(CHUNKS):
        xs = ()
        for i in tl.static_range(8):
            x = tl.load(X + c * BW * 8 + column + i * 4, mask=c * BW + word < KW, other=0.0).to(tl.float32)
            squares += x * x
            if HAS_NORM:
                x *= norms[c * 8 + i].to(tl.float32)
            xs = xs + (x,)
        if ROUNDS:
            inputs = inputs + (_round_input(xs, BW, HAS_ASM),)
        else:
            inputs = inputs + (_halve_input(xs, BW, HAS_ASM),)
    # --- tile by tile: the next one is on its way while this one is multiplied
    for tile in tl.range(num_tiles):
        part = tl.zeros((BN, BLOCKS), tl.float32)
        other = part
        held = load_held(Y, 0, rn, rn < N, N, ADDS)
        is_more = (rn + BN < N) & (tile + 1 < num_tiles)
        step = (tile + 1) * BN
        so_far = (words, factors, others, other_factors)
        words, factors, others, other_factors = (), (), (), ()
        for c in tl.static_range(CHUNKS):
            parted, power, sums = inputs[c]
            is_word = is_more[:, None] & (c * BW + word < KW)[None, :]
            is_block = is_more[:, None] & (c * BLOCKS + block < KB)[None, :]
            next_at = at + step * KW + c * BW
            next_factors = factors_at + step * KB + c * BLOCKS
            w = tl.load(next_at, mask=is_word, other=0, eviction_policy="evict_first")
            f = tl.load(next_factors, mask=is_block, other=0, eviction_policy="evict_first")
            words, factors = words + (w,), factors + (f,)
            part += _multiply_blocks(so_far[0][c], so_far[1][c], parted, power, sums, BN, BW, ROUNDS, HAS_ASM)
            if IS_GATED:
                w = tl.load(next_at + beside, mask=is_word, other=0, eviction_policy="evict_first")
                f = tl.load(next_factors + factors_beside, mask=is_block, other=0, eviction_policy="evict_first")
                other += _multiply_blocks(so_far[2][c], so_far[3][c], parted, power, sums, BN, BW, ROUNDS, HAS_ASM)
            others, other_factors = others + (w,), other_factors + (f,)
        write_result(
            part, other, squares, held, 0, rn, rn < N, BIAS, Y, eps, N, K, ACT, IS_GATED, ADDS, HAS_NORM, HAS_BIAS
        )
        rn += BN


def multiply_nibbles(
    weight: Words,  # (outputs, inputs) of 4 bits
    x: torch.Tensor,  # (1, inputs)
    out: torch.Tensor,  # (1, outputs)
    tiling: NibbleTiling,
    *,
    rounds: bool,  # the input to 8 bits, block by block
    **around: Unpack[Around],
) -> None:
    """As `multiply_words`, of one row."""
    launch_product(
        _multiply_nibbles,
        (weight.words, weight.factors),
        weight.shape,
        x,
        out,
        tiling.rows * tiling.tiles,
        around,
        tiling.tiles,
        BN=tiling.rows,
        BW=min(tiling.words, max(128, triton.next_power_of_2(weight.words.shape[1]))),
        ROUNDS=rounds,
        HAS_ASM=x.is_cuda,
        num_warps=tiling.warps,
    )
