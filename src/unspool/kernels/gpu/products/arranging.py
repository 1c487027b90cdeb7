"""Rows of an input in the order in which products with words read them.

A word of a quantised matrix holds numbers that lie some columns apart (`words`). Two of them, half a word apart, are
unpacked at a time and stay neighbours; four threads share a row of the matrix, and the tensor cores take two columns
of each in turn. Each of the four has a run of neighbouring words, then the next one: in an arranged row the first pair
of each thread's first word comes first, then the second pair of it, and so on through the words of the runs.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from unspool.kernels.cpu.blocks import BLOCK
from unspool.kernels.gpu.launching import launch, launch_options, let_next_start, wait_for_input
from unspool.kernels.gpu.products.word_parts import arrange_row

_AT_ONCE: Final = 1024
_THREADS: Final = 4  # that share a row of the matrix
GROUP: Final = _THREADS * BLOCK  # columns that are arranged among themselves, if rows have whole groups of them


def find_run(columns: int, bits: int) -> int:
    """How many neighbouring words a thread takes: a block's if the columns make whole groups of such runs, else one."""
    return bits if columns % GROUP == 0 else 1


@triton.jit
def _arrange(X, OUT, K, BITS: tl.constexpr, IS_WHOLE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * K
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    let_next_start(PDL)
    wait_for_input(PDL)
    x, place = arrange_row(tl.load(X + row + at, mask=at < K, other=0.0), at, K, BLOCK, BITS, IS_WHOLE)
    tl.store(OUT + row + place, x, mask=at < K)


def arrange(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Rows (rows, columns) in the order of words of 4- or 8-bit numbers."""
    rows, columns = x.shape
    out = torch.empty_like(x)
    grid = (rows, triton.cdiv(columns, _AT_ONCE))
    is_whole = columns % GROUP == 0
    launch(_arrange, grid, x, out, columns, BITS=bits, IS_WHOLE=is_whole, BLOCK=_AT_ONCE, **launch_options())
    return out


def arrange_plainly(x: torch.Tensor, bits: int) -> torch.Tensor:
    """The reference of `arrange`."""
    rows, columns = x.shape
    pairs = 16 // bits  # of a word
    if find_run(columns, bits) > 1:
        dealt = x.view(rows, columns // GROUP, _THREADS, 2, pairs, bits)  # … halves, pairs, words
        return dealt.permute(0, 1, 5, 4, 2, 3).reshape(rows, columns)
    dealt = x.view(rows, columns // BLOCK, 2, pairs, bits // _THREADS, _THREADS)
    return dealt.permute(0, 1, 4, 3, 5, 2).reshape(rows, columns)
