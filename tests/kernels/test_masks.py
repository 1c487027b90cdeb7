"""Masks of bits on scores: the C library beside torch's operators."""

from __future__ import annotations

import pytest
import torch

from unspool.kernels.cpu.library import find_library
from unspool.kernels.masks import keep_allowed, keep_allowed_plainly, raise_listed, raise_listed_plainly


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 160, 49_152])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_ways_leave_the_same_scores(vocab: int, dtype: torch.dtype) -> None:
    made = torch.Generator().manual_seed(vocab)
    scores = torch.randn(3, vocab, generator=made).to(dtype)
    is_allowed = torch.rand(3, vocab, generator=made) < 0.4
    is_allowed[1] = True
    words = (vocab + 31) // 32
    padded = torch.nn.functional.pad(is_allowed, (0, 32 * words - vocab)).view(3, words, 32).long()
    bits = (padded << torch.arange(32)).sum(-1)
    bits = torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32)
    expected = scores.masked_fill(~is_allowed, float("-inf"))
    for way in (keep_allowed, keep_allowed_plainly):
        assert torch.equal(way(scores, bits), expected)
    raised = torch.where(is_allowed, scores + 1.5, scores)
    for more in (raise_listed, raise_listed_plainly):
        assert torch.equal(more(scores, bits, 1.5), raised)
    assert dtype != torch.float32 or find_library() is not None
