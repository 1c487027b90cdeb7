"""Words of a quantised matrix as 16-bit floats in registers, in the order in which the tensor cores take them.

A thread gives the tensor cores pairs of neighbouring columns of its rows, eight columns apart. So four threads share a
row: each takes every fourth run of words, a block's where the columns make whole groups of four blocks (then it reads
a block's factors once) and single words elsewhere. The rows of the other side have been arranged for that
(`arranging`).
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from unspool.kernels.gpu.products.word_parts import half_of, read_float

# Instructions that make halves of a word of two numbers; `early_words` uses them too.
HALF_NIBBLES: Final = tl.constexpr(
    """{
.reg .b32 t, one, off;
mov.b32 one, 0x3C003C00;
mov.b32 off, 0xE408E408;
lop3.b32 t, $1, 0x000F000F, 0x64006400, 0xEA;
fma.rn.f16x2 t, t, one, off;
fma.rn.f16x2 $0, t, $2, $3;
}"""
)
NIBBLES: Final = tl.constexpr(
    """{
.reg .b32 t, one, off;
mov.b32 one, 0x3F803F80;
mov.b32 off, 0xC308C308;
lop3.b32 t, $1, 0x000F000F, 0x43004300, 0xEA;
fma.rn.bf16x2 t, t, one, off;
fma.rn.bf16x2 $0, t, $2, $3;
}"""
)
HALF_BYTES: Final = tl.constexpr(
    """{
.reg .b32 t, one, off;
mov.b32 one, 0x3C003C00;
mov.b32 off, 0xE480E480;
lop3.b32 t, $1, 0x00FF00FF, 0x64006400, 0xEA;
fma.rn.f16x2 t, t, one, off;
mul.rn.f16x2 $0, t, $2;
}"""
)
BYTES: Final = tl.constexpr(
    """{
.reg .b32 t, u, minus;
mov.b32 minus, 0xBF80BF80;
lop3.b32 t, $1, 0x007F007F, 0x43004300, 0xEA;
lop3.b32 u, $1, 0x00800080, 0x43804380, 0x6A;
fma.rn.bf16x2 t, u, minus, t;
mul.rn.bf16x2 u, t, $3;
fma.rn.bf16x2 $0, t, $2, u;
}"""
)


def _write_widening(place: int, kind: str, shift: int, power: int) -> str:
    """Instructions that widen the floats of 8 bits at a place, 0 or 1, of both halves of a word.

    Their exponents and mantissas move to where `kind` has its own, `shift` bits up from a byte's, and are multiplied by
    a power of two, because exponents of `kind` count from another one; signs go to the highest bits.
    """
    if place == 0:
        moves = f"shl.b32 t, $1, {shift};\nshl.b32 u, $1, 8;\nand.b32 u, u, 0x80008000;"
    else:
        moves = f"shr.u32 t, $1, {8 - shift};\nand.b32 u, $1, 0x80008000;"
    return f"""{{
.reg .b32 t, u, up;
mov.b32 up, 0x{power * 0x10001:08X};
{moves}
lop3.b32 t, t, 0x{(0x7F << shift) * 0x10001:08X}, u, 0xEA;
mul.rn.{kind}x2 $0, t, up;
}}"""


_HALF: Final = ("f16", 7, 0x5C00)  # 2 ** 8
_BRAIN: Final = ("bf16", 4, 0x7B80)  # 2 ** 120
HALF_FLOATS_LOW: Final = tl.constexpr(_write_widening(0, *_HALF))
HALF_FLOATS_HIGH: Final = tl.constexpr(_write_widening(1, *_HALF))
FLOATS_LOW: Final = tl.constexpr(_write_widening(0, *_BRAIN))
FLOATS_HIGH: Final = tl.constexpr(_write_widening(1, *_BRAIN))


@triton.jit
def _join_twice(x, IS_HALF: tl.constexpr):
    """A number as both halves of a word, in float16 or bfloat16."""
    CODE: tl.constexpr = "cvt.rn.f16x2.f32 $0, $1, $1;" if IS_HALF else "cvt.rn.bf16x2.f32 $0, $1, $1;"
    return tl.inline_asm_elementwise(CODE, "=r,f", [x], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _scale_nibbles(words, scale, least, IS_HALF: tl.constexpr):
    """The lowest four bits of both halves of words, minus 8, by their scale, and their least: halves again.

    Numbers are put into the mantissa of 128 (bfloat16) or 1024 (float16), which is subtracted.
    """
    CODE: tl.constexpr = HALF_NIBBLES if IS_HALF else NIBBLES
    return tl.inline_asm_elementwise(CODE, "=r,r,r,r", [words, scale, least], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _scale_bytes(words, scale, rest, IS_HALF: tl.constexpr):
    """The lowest byte of both halves of words, minus 128, by their scale: halves again.

    float16 holds 1024 + 255. bfloat16 holds 128 + 127: a byte's highest bit chooses what is subtracted, 128 or 256.
    What a scale loses in bfloat16 is its `rest`, so that the result is rounded as if the scale were exact.
    """
    CODE: tl.constexpr = HALF_BYTES if IS_HALF else BYTES
    return tl.inline_asm_elementwise(CODE, "=r,r,r,r", [words, scale, rest], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _widen_floats(words, PLACE: tl.constexpr, IS_HALF: tl.constexpr):
    """The bytes at PLACE and two further, floats of 8 bits, as halves: bits in their places, times a power of two."""
    LOW: tl.constexpr = HALF_FLOATS_LOW if IS_HALF else FLOATS_LOW
    HIGH: tl.constexpr = HALF_FLOATS_HIGH if IS_HALF else FLOATS_HIGH
    CODE: tl.constexpr = LOW if PLACE == 0 else HIGH
    return tl.inline_asm_elementwise(CODE, "=r,r", [words], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _spread(x, BN: tl.constexpr, BLOCKS: tl.constexpr, WORDS: tl.constexpr):
    """What blocks have (BN, BLOCKS), for each of their words: (BN, BLOCKS * WORDS)."""
    return tl.reshape(tl.broadcast_to(x[:, :, None], (BN, BLOCKS, WORDS)), (BN, BLOCKS * WORDS))


@triton.jit
def read_factors(
    found, BN: tl.constexpr, BW: tl.constexpr, BITS: tl.constexpr, IS_HALF: tl.constexpr, HAS_ASM: tl.constexpr
):
    """Two factors of every word's block, as `unpack` takes them: scale and least, or scale and its rest."""
    BLOCKS: tl.constexpr = BW // BITS
    if BITS == 4:
        scale = half_of(found, False)
        other = half_of(found, True) + 8.0 * scale
    else:
        scale = found.to(tl.float16, bitcast=True).to(tl.float32)
        other = scale - scale.to(tl.bfloat16).to(tl.float32)
    if HAS_ASM:
        scale, other = _join_twice(scale, IS_HALF), _join_twice(other, IS_HALF)
    return _spread(scale, BN, BLOCKS, BITS), _spread(other, BN, BLOCKS, BITS)


@triton.jit
def _deal(places, BN: tl.constexpr, BW: tl.constexpr, BITS: tl.constexpr, RUN: tl.constexpr):
    """What the words' places hold, (BN, BW) each, in the order of `arranging`: a run's places, and then its thread."""
    RUNS: tl.constexpr = BW // (4 * RUN)
    if BITS == 4:
        joined = tl.join(tl.join(places[0], places[1]), tl.join(places[2], places[3]))
        found = tl.permute(tl.reshape(joined, (BN, RUNS, 4, RUN, 2, 2)), (0, 1, 3, 5, 4, 2))
    else:
        joined = tl.join(places[0], places[1])
        found = tl.permute(tl.reshape(joined, (BN, RUNS, 4, RUN, 2)), (0, 1, 3, 4, 2))
    return tl.reshape(found, (BN, BW * (16 // BITS)))


@triton.jit
def unpack(
    words, factors,
    BN: tl.constexpr, BW: tl.constexpr, BITS: tl.constexpr, RUN: tl.constexpr, IS_FLOAT: tl.constexpr,
    IS_HALF: tl.constexpr, HAS_ASM: tl.constexpr,
):  # fmt: skip
    """The numbers of words (BN, BW) in the order of `arranging`: (BN, BW * 32 // BITS); floats without their scale.

    A place of a word is two of its numbers, half a word apart: they are neighbours then.
    """
    if HAS_ASM:
        places = ()
        for place in tl.static_range(16 // BITS):
            if IS_FLOAT:
                pairs = _widen_floats(words, place, IS_HALF)
            elif BITS == 4:
                pairs = _scale_nibbles(words >> (4 * place), factors[0], factors[1], IS_HALF)
            else:
                pairs = _scale_bytes(words >> (8 * place), factors[0], factors[1], IS_HALF)
            places = places + (pairs,)
        both = _deal(places, BN, BW, BITS, RUN)
        low, high = both.to(tl.int16), (both >> 16).to(tl.int16)
        if IS_HALF:
            low, high = low.to(tl.float16, bitcast=True), high.to(tl.float16, bitcast=True)
        else:
            low, high = low.to(tl.bfloat16, bitcast=True), high.to(tl.bfloat16, bitcast=True)
    else:
        lows, highs = (), ()
        for place in tl.static_range(16 // BITS):
            a, b = words >> (BITS * place), words >> (BITS * place + 16)
            if IS_FLOAT:
                lows, highs = lows + (read_float(words, place),), highs + (read_float(words, place + 2),)
            elif BITS == 4:
                lows = lows + (((a & 15).to(tl.float32) - 8.0) * factors[0] + factors[1],)
                highs = highs + (((b & 15).to(tl.float32) - 8.0) * factors[0] + factors[1],)
            else:
                lows = lows + (((a & 255).to(tl.float32) - 128.0) * factors[0],)
                highs = highs + (((b & 255).to(tl.float32) - 128.0) * factors[0],)
        low, high = _deal(lows, BN, BW, BITS, RUN), _deal(highs, BN, BW, BITS, RUN)
    return tl.reshape(tl.join(low, high), (BN, BW * (32 // BITS)))


@triton.jit
def part_tile(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Four quarters of a tile's columns (ROWS, 4 * COLUMNS), one after the other."""
    dealt = tl.permute(tl.reshape(x, (ROWS, 2, 2, COLUMNS)), (0, 3, 1, 2))
    even, odd = tl.split(dealt)
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth
