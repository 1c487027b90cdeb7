"""Prompts for the little model, and a processor that makes it write known tokens."""

from __future__ import annotations

from typing import Any

import torch

from unspool import LanguageModel, LogitsProcessor

TEXTS = ["hello the cat", "a", "stop and the world"]
CHAT = [{"role": "user", "content": "hello"}]
CONTEXT = 128  # of the little model


class Dictate(LogitsProcessor):
    """Makes a model write known tokens: the same for every row, or a list a row."""

    def __init__(self, *rows: list[int], prompt_width: int) -> None:
        self.rows = rows
        self.width = prompt_width

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        step = input_ids.shape[1] - self.width
        scores = torch.full_like(scores, -torch.inf)
        for row in range(scores.shape[0]):
            tokens = self.rows[row % len(self.rows)]
            scores[row, tokens[step] if step < len(tokens) else 2] = 0.0
        return scores


def dictate(lm: LanguageModel, text: str, **settings: Any) -> dict[str, Any]:
    """Settings with which the prompt "hello" is continued by `text` and the end token."""
    tokens = lm.tokenizer.encode(text)
    return {"logits_processor": [Dictate(tokens, prompt_width=1)], "max_new_tokens": len(tokens) + 3} | settings
