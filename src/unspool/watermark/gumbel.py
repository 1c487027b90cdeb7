"""Gumbel sampling with keyed noise: the token is a function of the key, the tokens before and the probabilities.

Aaronson's scheme ("Watermarking of large language models", 2022; arXiv 2301.10226, section 7, compares it): every
token has a uniform number that the key and the context choose, and the token with the least `-log(1 - u) / p` is taken,
which is the one with the least `log(-log(1 - u)) - score`.
Over keys that is a draw from the distribution, so nothing is distorted.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from unspool.config import GumbelWatermarkingConfig
from unspool.kernels.contexts import Text
from unspool.kernels.cpu import find_marks
from unspool.kernels.cpu.mark_calls import KeyedDrawCall, MarkCall, Window
from unspool.kernels.presence import runs_kernels
from unspool.kernels.splitmix import STEP, as_signed, mix, mix_tensor
from unspool.logits.watermark import PromptedWatermark
from unspool.watermark.contexts import read_contexts

_TOKEN = 0x9E3779B1
_FINAL_1, _FINAL_2 = 0x85EBCA6B, 0xC2B2AE35
_LOW = (1 << 32) - 1
INF = float("inf")
NO_TOKEN = -1  # nothing can be drawn


class GumbelWatermarkLogitsProcessor(PromptedWatermark):
    """Leaves one token: the one that keyed noise draws from the scores.

    A context that the text had before would draw with the same noise again, so there the scores stay as they are.
    """

    def __init__(
        self,
        vocab_size: int,
        device: Any,  # as the other watermarks' processors; the noise is the same on all devices
        hashing_key: int = 15485863,
        context_width: int = 4,
        *,
        prompt_width: int = 0,
    ) -> None:
        GumbelWatermarkingConfig(hashing_key, context_width).validate()
        self.vocab_size = vocab_size
        self.context_width = context_width
        self._begin_after(prompt_width)
        self._key = hashing_key
        self._start = as_signed(mix(hashing_key))  # what hashes begin with

    @property
    def mark(self) -> Hashable:
        """The key and the settings."""
        return type(self), self.vocab_size, self.context_width, self._key

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, pads: torch.Tensor | None = None) -> torch.Tensor:
        """Zero for the drawn token and minus infinity for all others; repeated contexts' scores as they are."""
        window = self._find_window(input_ids.shape[-1])
        firsts = self.list_prompt_widths(scores) if self.has_prompts else None
        text = Text(input_ids, window.start, window.width, window.first, pads, firsts)
        states, repeated = read_contexts(text, self._start, self.hash_contexts, mixes=True)
        if runs_kernels(scores.device):
            from unspool.kernels.gpu.marks.gumbel import leave_drawn  # Triton is imported where a GPU is used

            return leave_drawn(scores, states, repeated)
        marks = find_marks() if scores.device.type == "cpu" and scores.dtype == torch.float32 else None
        if marks is not None:
            tokens = marks.draw_keyed(scores, states, repeated).long()
        else:
            tokens = self.draw_plainly(scores, states).masked_fill(repeated.bool(), NO_TOKEN)
        is_kept = tokens[:, None] == NO_TOKEN
        alone = torch.full_like(scores, -INF).scatter_(-1, tokens[:, None].clamp(min=0), 0.0)
        return torch.where(is_kept, scores, alone) if bool(is_kept.any()) else alone

    def prepare_steps(self, ids: torch.Tensor, vocab: int, pads: torch.Tensor | None) -> MarkCall | None:
        """The library's keyed draw for every step."""
        marks = find_marks() if ids.device.type == "cpu" and not self.has_prompts else None
        return None if marks is None else KeyedDrawCall(marks, ids, vocab, self._start, pads, self._find_window)

    def _find_window(self, columns: int) -> Window:
        """What of a text of so many columns is context: all of it; prompts' windows are no earlier ones."""
        return Window(0, columns, self.context_width, min(self.prompt_width, columns))

    def draw_plainly(self, scores: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """The tokens (rows,) that noise of these states draws from scores (rows, vocab), operator by operator.

        The first of those with the least key; NO_TOKEN if no score is finite, or one is NaN or infinite. Keys are
        float64, so that rounding makes no difference between devices.
        """
        tokens = torch.arange(scores.shape[-1], device=scores.device)
        noise = self.draw_noise(states[:, None], tokens)
        least, drawn = (torch.log(-torch.log1p(-noise)) - scores.double()).min(dim=-1)  # NaN if one of them is
        return torch.where(least.isfinite(), drawn, NO_TOKEN)

    def hash_contexts(self, contexts: torch.Tensor) -> torch.Tensor:
        """The state (…), int64, that the key and a context (…, width) give the noise."""
        state = torch.full(contexts.shape[:-1], self._start, dtype=torch.int64, device=contexts.device)
        for place in range(contexts.shape[-1]):
            state = mix_tensor(state + (contexts[..., place] + 1) * as_signed(STEP))
        return state

    def draw_noise(self, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """The uniform numbers in (0, 1), float64, of tokens after contexts of these states; small ones win."""
        low, high = states & _LOW, (states >> 32) & _LOW
        word = _finish(((tokens * _TOKEN) + low) & _LOW)
        return (_finish(word ^ high).to(torch.float64) + 0.5) * 2.0**-32


def _finish(word: torch.Tensor) -> torch.Tensor:
    """MurmurHash3's 32-bit finaliser, on 32 bits in int64."""
    word = ((word ^ (word >> 16)) * _FINAL_1) & _LOW
    word = ((word ^ (word >> 13)) * _FINAL_2) & _LOW
    return word ^ (word >> 16)
