"""Scores under masks of bits: -inf where a bit is not set, or more where it is."""

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


def raise_listed(scores: torch.Tensor, bits: torch.Tensor, bias: float) -> torch.Tensor:
    """The scores (rows, vocab), more by `bias` for tokens whose bit in `bits` (rows, words of 32 bits) is set."""
    library = find_library() if scores.device.type == "cpu" and scores.dtype == torch.float32 else None
    return raise_listed_plainly(scores, bits, bias) if library is None else library.raise_listed(scores, bits, bias)


def raise_listed_plainly(scores: torch.Tensor, bits: torch.Tensor, bias: float) -> torch.Tensor:
    """The same in torch's operators."""
    return torch.where(_read_bits(bits, scores.shape[1]), scores + bias, scores)


def keep_allowed_plainly(scores: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """The same in torch's operators."""
    return scores.masked_fill(~_read_bits(bits, scores.shape[1]), float("-inf"))


def _read_bits(bits: torch.Tensor, count: int) -> torch.Tensor:
    """The first `count` bits of words (rows, words): (rows, count) bool."""
    place = torch.arange(count, device=bits.device)
    return (bits.index_select(1, place >> 5) >> (place & 31)) & 1 != 0
