"""Packed keys of 4 bits read in two halves of their channels: low nibbles are one, high nibbles the other.

This is the default packing: keys by channel, values by token in one group or two. The tensor cores get the codes minus
8, which is exact in 16 bits: a key's scale is multiplied into the query, a value's into its weight, and the offset of
a group is added once.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _spread_nibbles(raw, IS_BF16: tl.constexpr, HAS_ASM: tl.constexpr):
    """Low and high nibbles of bytes, minus 8, as 16-bit floats.

    A nibble is put into the mantissa of 128 (bfloat16) or 1024 (float16), two at a time, and the excess is subtracted.
    The compiler must not move this behind a change of layout, which would then move four times the bytes.
    """
    if not HAS_ASM:
        wide = raw.to(tl.int32)
        low, high = ((wide & 15) - 8).to(tl.float32), ((wide >> 4) - 8).to(tl.float32)
        if IS_BF16:
            low, high = low.to(tl.bfloat16), high.to(tl.bfloat16)
        else:
            low, high = low.to(tl.float16), high.to(tl.float16)
    elif IS_BF16:
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c, d, one, off;
            mov.b32 one, 0x3F803F80;
            mov.b32 off, 0xC308C308;
            prmt.b32 a, $4, 0, 0x4140;
            prmt.b32 b, $4, 0, 0x4342;
            shr.u32 c, a, 4;
            shr.u32 d, b, 4;
            lop3.b32 a, a, 0x000F000F, 0x43004300, 0xEA;
            lop3.b32 b, b, 0x000F000F, 0x43004300, 0xEA;
            lop3.b32 c, c, 0x000F000F, 0x43004300, 0xEA;
            lop3.b32 d, d, 0x000F000F, 0x43004300, 0xEA;
            fma.rn.bf16x2 $0, a, one, off;
            fma.rn.bf16x2 $1, b, one, off;
            fma.rn.bf16x2 $2, c, one, off;
            fma.rn.bf16x2 $3, d, one, off;
            }""",
            "=r,=r,=r,=r,r", [raw], dtype=(tl.bfloat16, tl.bfloat16), is_pure=False, pack=4,
        )  # fmt: skip
    else:
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c, d, one, off, part, less;
            mov.b32 one, 0x3C003C00;
            mov.b32 off, 0xE408E408;
            mov.b32 part, 0x2C002C00;
            mov.b32 less, 0xD480D480;
            prmt.b32 a, $4, 0, 0x4140;
            prmt.b32 b, $4, 0, 0x4342;
            lop3.b32 c, a, 0x00F000F0, 0x64006400, 0xEA;
            lop3.b32 d, b, 0x00F000F0, 0x64006400, 0xEA;
            lop3.b32 a, a, 0x000F000F, 0x64006400, 0xEA;
            lop3.b32 b, b, 0x000F000F, 0x64006400, 0xEA;
            fma.rn.f16x2 $0, a, one, off;
            fma.rn.f16x2 $1, b, one, off;
            fma.rn.f16x2 $2, c, part, less;
            fma.rn.f16x2 $3, d, part, less;
            }""",
            "=r,=r,=r,=r,r", [raw], dtype=(tl.float16, tl.float16), is_pure=False, pack=4,
        )  # fmt: skip
    return low, high


@triton.jit
def _hold(pairs, IS_BF16: tl.constexpr, HAS_ASM: tl.constexpr):
    """The same numbers; the compiler can't move what made them behind a change of layout."""
    if HAS_ASM:
        if IS_BF16:
            found = tl.inline_asm_elementwise(
                "mov.b32 $0, $1;", "=r,r", [pairs], dtype=tl.bfloat16, is_pure=False, pack=2
            )
        else:
            found = tl.inline_asm_elementwise(
                "mov.b32 $0, $1;", "=r,r", [pairs], dtype=tl.float16, is_pure=False, pack=2
            )
    else:
        found = pairs
    return found


@triton.jit
def _load_of_keys(SCALES, ZEROS, start, is_there, GP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    """Scales and zero points of a block's keys for every query: those of low channels, then those of high ones.

    They are loaded query by query, so that a thread gets neighbouring channels in one load; only the first load goes
    to memory.
    """
    H: tl.constexpr = D // 2
    at = start // BLOCK * D + tl.arange(0, GP)[:, None] * 0 + tl.arange(0, H)[None, :]
    low_scale = tl.load(SCALES + at, mask=is_there, other=0.0)
    high_scale = tl.load(SCALES + at + H, mask=is_there, other=0.0)
    low_zero = tl.load(ZEROS + at, mask=is_there, other=0.0)
    high_zero = tl.load(ZEROS + at + H, mask=is_there, other=0.0)
    return low_scale, high_scale, low_zero, high_zero


@triton.jit
def _load_of_values(SCALES, ZEROS, start, is_there, TILE: tl.constexpr, IS_PAIR: tl.constexpr):
    """Scales and zero points of a tile's values as stored: both groups in one word if there are two."""
    place = start + tl.arange(0, TILE)
    if IS_PAIR:
        SCALES, ZEROS = SCALES.to(tl.pointer_type(tl.int32)), ZEROS.to(tl.pointer_type(tl.int32))
    scale = tl.load(SCALES + place, mask=is_there, other=0)
    zero = tl.load(ZEROS + place, mask=is_there, other=0)
    return scale, zero


@triton.jit
def _part_pair(found, IS_PAIR: tl.constexpr):
    """The numbers of both groups as float32."""
    if IS_PAIR:
        first = found.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        second = (found >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        first = found.to(tl.float32)
        second = first
    return first, second


@triton.jit
def read_in_halves(
    query, key_codes, key_scales, key_zeros, value_codes, value_scales, value_zeros, slopes,
    begin, end, first, scale, softcap,
    GP: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, IS_PAIR: tl.constexpr,
    STAGES: tl.constexpr, HAS_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SLOPES: tl.constexpr,
    HAS_ASM: tl.constexpr,
):  # fmt: skip
    """Attention of queries (GP, D) to packed positions from `begin` to `end`: highest scores, sums of weights, outputs.

    A tile's scales and zero points are loaded while the tile before it is processed. There may be no tile at all, and
    `begin` is then out of bounds: the loads before the first tile are therefore masked.
    """
    H: tl.constexpr = D // 2  # bytes of a position, and channels of a half
    DTYPE: tl.constexpr = query.dtype
    IS_BF16: tl.constexpr = query.dtype == tl.bfloat16
    low_query, high_query = tl.split(tl.permute(tl.reshape(query, (GP, 2, H)), (0, 2, 1)))
    low_wide, high_wide = low_query.to(tl.float32) * scale, high_query.to(tl.float32) * scale
    highest = tl.full((GP,), float("-inf"), tl.float32)
    # Sums of weights, and of each group's offsets, are kept per element and reduced at the end.
    total = tl.full((GP, TILE), 0.0, tl.float32)
    first_more, second_more = total, total
    low_read = tl.full((GP, H), 0.0, tl.float32)
    high_read = tl.full((GP, H), 0.0, tl.float32)
    of_keys = _load_of_keys(key_scales, key_zeros, begin, begin < end, GP, D, BLOCK)
    of_values = _load_of_values(value_scales, value_zeros, begin, begin < end, TILE, IS_PAIR)
    for start in tl.range(begin, end, TILE, num_stages=STAGES):
        place = start + tl.arange(0, TILE)
        at = place[:, None] * H + tl.arange(0, H)[None, :]
        key_bytes = tl.load(key_codes + at)
        value_bytes = tl.load(value_codes + at)
        low_scale, high_scale = of_keys[0].to(tl.float32), of_keys[1].to(tl.float32)
        low_zero = of_keys[2].to(tl.float32) + 8.0 * low_scale
        high_zero = of_keys[3].to(tl.float32) + 8.0 * high_scale
        first_scale, second_scale = _part_pair(of_values[0], IS_PAIR)
        first_zero, second_zero = _part_pair(of_values[1], IS_PAIR)
        first_zero += 8.0 * first_scale
        second_zero += 8.0 * second_scale
        following = tl.minimum(start + TILE, end - TILE)
        of_keys = _load_of_keys(key_scales, key_zeros, following, True, GP, D, BLOCK)
        of_values = _load_of_values(value_scales, value_zeros, following, True, TILE, IS_PAIR)
        low, high = _spread_nibbles(key_bytes, IS_BF16, HAS_ASM)
        low_scaled = _hold((low_wide * low_scale).to(DTYPE), IS_BF16, HAS_ASM)
        high_scaled = _hold((high_wide * high_scale).to(DTYPE), IS_BF16, HAS_ASM)
        scores = tl.dot(low_scaled, tl.trans(low))
        scores = tl.dot(high_scaled, tl.trans(high), scores)
        scores += tl.sum(low_wide * low_zero + high_wide * high_zero, 1)[:, None]
        if HAS_CAP:
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
        if HAS_SLOPES:
            scores += slopes[:, None] * place.to(tl.float32)[None, :]
        if HAS_WINDOW:
            scores = tl.where((place >= first)[None, :], scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        fade = tl.exp(highest - higher)
        weights = tl.exp(scores - higher[:, None])
        highest = higher
        total = total * fade[:, None] + weights
        first_more = first_more * fade[:, None] + weights * first_zero[None, :]
        low, high = _spread_nibbles(value_bytes, IS_BF16, HAS_ASM)
        low_weights = (weights * first_scale[None, :]).to(DTYPE)
        high_weights = low_weights
        if IS_PAIR:
            second_more = second_more * fade[:, None] + weights * second_zero[None, :]
            high_weights = (weights * second_scale[None, :]).to(DTYPE)
        low_read = tl.dot(low_weights, low, low_read * fade[:, None])
        high_read = tl.dot(high_weights, high, high_read * fade[:, None])
    low_more = tl.sum(first_more, 1)[:, None]
    high_more = low_more
    if IS_PAIR:
        high_more = tl.sum(second_more, 1)[:, None]
    low_read += low_more
    high_read += high_more
    read = tl.reshape(tl.permute(tl.join(low_read, high_read), (0, 2, 1)), (GP, D))
    return highest, tl.sum(total, 1), read
