"""When a pass over ragged rows is made of its real tokens alone."""

from __future__ import annotations

from typing import Final

import torch

from unspool.cache import FLAT, Cache, Span
from unspool.kernels.ragged import has_flash
from unspool.models.spec import DecoderSpec

_LEAST_SAVED: Final = 1.15  # positions of the filled form over real tokens
_LEAST_TOKENS: Final = 64  # fewer are a step, whose time is not theirs


class Layout:
    """Says of a decoder's passes whether their real tokens are laid one behind the other."""

    def __init__(self, spec: DecoderSpec, device: torch.device, dtype: torch.dtype) -> None:
        self._window = spec.window if "sliding" in spec.layer_kinds else None
        is_plain = spec.alibi is None and spec.attention_softcap is None
        self._has_kernel = is_plain and has_flash(device, dtype, spec.head_dim)

    def flattens(self, cache: Cache, span: Span) -> bool:
        """Whether that saves more than it costs: positions that are not real, or the masks of filled attention."""
        num_real = sum(span.counts)
        if span.num_new == 1 or num_real < _LEAST_TOKENS:
            return False
        if len(span.counts) * span.num_new >= _LEAST_SAVED * num_real:
            return True
        needs_mask = any(span.starts) or (self._window is not None and span.stop > self._window)
        return needs_mask and self._has_kernel and FLAT in cache.can
