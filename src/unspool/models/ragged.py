"""When a pass over ragged rows is made of its real tokens alone."""

from __future__ import annotations

from typing import Final

import torch

from unspool.cache import FLAT, Cache, Span
from unspool.kernels.ragged import BLOCK, has_flash
from unspool.models.spec import DecoderSpec

# Positions of the filled form over real tokens: laying tokens out and reading row by row costs 5 %, for many short rows
# 10 % (float32, two cores of an Arm CPU).
_LEAST_SAVED: Final = 1.15
_LEAST_TOKENS: Final = 64  # fewer are a step, whose time is not theirs


class Layout:
    """Says of a decoder's passes whether their real tokens are laid one behind the other."""

    def __init__(self, spec: DecoderSpec, device: torch.device, dtype: torch.dtype) -> None:
        self._window = spec.window if "sliding" in spec.layer_kinds else None
        self._has_softcap = spec.attention_softcap is not None
        self._has_bias = spec.alibi is not None
        self._has_kernel = not self._has_softcap and has_flash(device, dtype, spec.head_dim)

    def flattens(self, cache: Cache, span: Span) -> bool:
        """Whether that saves more than it costs: positions that are not real, or filled attention's masks."""
        num_real = sum(span.counts)
        if span.num_new == 1 or num_real < _LEAST_TOKENS:
            return False
        if len(span.counts) * span.num_new >= _LEAST_SAVED * num_real:
            return True
        return self._has_masks(span) and FLAT in cache.can and (self._has_kernel or span.num_new > BLOCK)

    def _has_masks(self, span: Span) -> bool:
        """Whether filled attention would need masks, or scores, of all queries and keys, and attention by rows not."""
        if self._has_bias:
            return False
        reaches_back = self._window is not None and span.stop > self._window
        return self._has_softcap or reaches_back or any(span.starts)
