"""Rows of an input in the order in which products with words read them.

A word of a quantised matrix holds numbers that lie some columns apart (`words`). A product takes two places of all
words at a time, half a word apart; so an arranged row has, for one such pair of places after the other, the columns of
all words, the two of a word side by side.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from unspool.kernels.gpu.launching import launch, launch_options, let_next_start, wait_for_input
from unspool.kernels.gpu.products.word_parts import find_place

_BLOCK = 1024


@triton.jit
def _arrange(X, OUT, K, BITS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * K
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    let_next_start(PDL)
    wait_for_input(PDL)
    tl.store(OUT + row + find_place(at, K, BITS), tl.load(X + row + at, mask=at < K, other=0.0), mask=at < K)


def arrange(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Rows (rows, columns) in the order of words of 4- or 8-bit numbers."""
    rows, columns = x.shape
    out = torch.empty_like(x)
    grid = (rows, triton.cdiv(columns, _BLOCK))
    launch(_arrange, grid, x, out, columns, BITS=bits, BLOCK=_BLOCK, **launch_options())
    return out


def arrange_plainly(x: torch.Tensor, bits: int) -> torch.Tensor:
    """The reference of `arrange`."""
    rows, columns = x.shape
    return x.view(rows, columns // 32, 2, 16 // bits, bits).permute(0, 3, 1, 4, 2).reshape(rows, columns)
