"""Splitting words of a matrix inside a kernel: blocks of four, and the halves and bytes of one."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def half_of(pair, IS_HIGH: tl.constexpr):
    """A word's low or high half as float32."""
    return (pair >> (16 if IS_HIGH else 0)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def part_words(words, ROWS: tl.constexpr, BLOCKS: tl.constexpr):
    """The four words of blocks (ROWS, 4 * BLOCKS) as four tensors."""
    even, odd = tl.split(tl.reshape(words, (ROWS, BLOCKS, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def choose_byte(words, BYTE: tl.constexpr, HAS_ASM: tl.constexpr):
    """One byte of every word, plus 2 ** 15."""
    if HAS_ASM:
        found = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, $3;",
            "=r,r,r,r",
            [words, tl.full((), 0x47000000, tl.int32), tl.full((), 0x7404 | (BYTE << 4), tl.int32)],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        found = (((words >> (8 * BYTE)) & 255) << 8) | 0x47000000
    return found.to(tl.float32, bitcast=True)


@triton.jit
def read_float(words, BYTE: tl.constexpr):
    """One byte of every word, a float of 8 bits, as float32: its bits in the places of float32's, times 2 ** 120."""
    if BYTE < 3:
        number = ((words << (20 - 8 * BYTE)) & 0x07F00000) | ((words << (24 - 8 * BYTE)) & -0x80000000)
    else:
        number = ((words >> 4) & 0x07F00000) | (words & -0x80000000)
    return number.to(tl.float32, bitcast=True) * 1.329227995784916e36


@triton.jit
def find_place(column, K, BITS: tl.constexpr):
    """Where an arranged row of K numbers (`arranging`) has a column; with 0 bits rows are as they are."""
    place = column
    if BITS > 0:
        inside = column % 32
        word, pair = column // 32 * BITS + inside % BITS, inside % 16 // BITS
        alone = (word // 4 * (16 // BITS) + pair) * 8 + word % 4 * 2
        together = ((word // (4 * BITS) * BITS + word % BITS) * (16 // BITS) + pair) * 8 + word // BITS % 4 * 2
        place = tl.where(K % 128 == 0, together, alone) + inside // 16
    return place


@triton.jit
def arrange_groups(y, SIZE: tl.constexpr, BITS: tl.constexpr):
    """Whole groups of 128 columns (SIZE, others), arranged: then they can be written side by side."""
    others: tl.constexpr = y.shape[1]
    dealt = tl.reshape(y, (SIZE // 128, 4, 2, 16 // BITS, BITS, others))
    return tl.reshape(tl.permute(dealt, (0, 4, 3, 1, 2, 5)), (SIZE, others))


@triton.jit
def arrange_row(y, at, N, SIZE: tl.constexpr, BITS: tl.constexpr, IS_WHOLE: tl.constexpr):
    """A row of N numbers, padded to SIZE, and where each is written; IS_WHOLE: it has groups of 128 columns only."""
    place = at
    if BITS > 0:
        if IS_WHOLE:
            dealt = tl.reshape(y, (SIZE // 128, 4, 2, 16 // BITS, BITS))
            y = tl.reshape(tl.permute(dealt, (0, 4, 3, 1, 2)), (SIZE,))
        else:
            place = find_place(at, N, BITS)
    return y, place
