"""Processors of audio models."""

from __future__ import annotations

import torch

from unspool.logits.base import LogitsProcessor
from unspool.logits.rows import as_positive_integer

INF = float("inf")


class AlternatingCodebooksLogitsProcessor(LogitsProcessor):
    """Lets tokens of two codebooks alternate, as Bark's coarse acoustics do (Suno AI, 2023)."""

    def __init__(self, input_start_len: int, semantic_vocab_size: int, codebook_size: int) -> None:
        self.input_start_len = as_positive_integer("input_start_len", input_start_len, at_least=0)
        self.semantic_vocab_size = as_positive_integer("semantic_vocab_size", semantic_vocab_size)
        self.codebook_size = as_positive_integer("codebook_size", codebook_size)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """The scores with all but the tokens of the codebook whose turn it is at -inf."""
        is_first = (input_ids.shape[-1] - self.input_start_len) % 2 == 0
        middle = self.semantic_vocab_size + self.codebook_size
        turn = slice(self.semantic_vocab_size, middle) if is_first else slice(middle, None)
        result = torch.full_like(scores, -INF)
        result[:, turn] = scores[:, turn]
        return result
