"""Scores under masks of bits: -inf where a bit is not set."""

from __future__ import annotations

import torch

from unspool.kernels.cpu.library import find_library
from unspool.kernels.presence import has_triton


def keep_allowed(scores: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """The scores (rows, vocab), -inf for tokens whose bit in `bits` (rows, words of 32 bits) is not set."""
    if scores.device.type == "cpu":
        library = find_library()
        if library is not None and scores.dtype == torch.float32:
            return library.keep_allowed(scores, bits)
        return keep_allowed_plainly(scores, bits)
    if scores.is_cuda and has_triton():
        from unspool.kernels.gpu.sampling.masks import keep_allowed_on_gpu  # brings Triton

        return keep_allowed_on_gpu(scores, bits)
    return keep_allowed_plainly(scores, bits)


def keep_allowed_plainly(scores: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """The same in torch's operators."""
    place = torch.arange(scores.shape[1], device=scores.device)
    words = bits.index_select(1, place >> 5)
    return scores.masked_fill((words >> (place & 31)) & 1 == 0, float("-inf"))
