"""Splitting words of a matrix inside a kernel: blocks of four, and the halves of one."""

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
