"""Scores under masks of bits, in one kernel."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from unspool.kernels.gpu.arguments import count_parts, lay_in_rows

BLOCK: Final = 1_024


@triton.jit
def _keep_allowed(SCORES, BITS, OUT, V, words, row_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = token < V
    word = tl.load(BITS + row * words + token // 32, mask=is_there, other=0)
    scores = tl.load(SCORES + row * row_stride + token, mask=is_there, other=0.0)
    is_allowed = ((word >> (token % 32)) & 1) != 0
    tl.store(OUT + row * V + token, tl.where(is_allowed, scores, float("-inf")), mask=is_there)


def keep_allowed_on_gpu(scores: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """The scores (rows, vocab), -inf for tokens whose bit in `bits` (rows, words) is not set."""
    rows, vocab = scores.shape
    scores = lay_in_rows(scores)
    out = torch.empty((rows, vocab), dtype=scores.dtype, device=scores.device)
    grid = (rows, count_parts(vocab, BLOCK))
    _keep_allowed[grid](scores, bits, out, vocab, bits.shape[1], scores.stride(0), BLOCK=BLOCK)
    return out
