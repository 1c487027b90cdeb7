"""Tokens that are forbidden to all rows alike, as a mask that captured passes add to scores."""

from __future__ import annotations

import math

import torch

from unspool.kernels.sending import send


class ForbiddenMasks:
    """The masks of a call, each made once: the device has the last one already."""

    def __init__(self, vocab: int) -> None:
        self._vocab = vocab
        self._made: dict[tuple[int, ...], torch.Tensor] = {}  # by the tokens

    def find(self, tokens: tuple[int, ...], device: torch.device) -> torch.Tensor:
        """(vocab,) float32: -inf for these tokens, 0 for all others; on the device of the call's rows."""
        mask = self._made.get(tokens)
        if mask is None:
            inside = send([token for token in tokens if 0 <= token < self._vocab], device)
            mask = torch.zeros(self._vocab, dtype=torch.float32, device=device).index_fill_(0, inside, -math.inf)
            self._made[tokens] = mask
        return mask
