"""When a pass over ragged rows computes only its real tokens."""

from __future__ import annotations

from functools import cached_property
from typing import Final

import torch

from unspool.cache import Cache, Span
from unspool.kernels.ragged import BLOCK, has_flash
from unspool.models.decoder.spec import DecoderSpec

# Positions of the filled form over real tokens: laying tokens out and reading row by row costs 5 %, for many short rows
# 10 % (float32, two cores of an Arm CPU).
_LEAST_SAVED: Final = 1.15
_LEAST_TOKENS: Final = 64  # fewer are a step, whose time does not depend on them


def can_read_rows(cache: Cache, spec: DecoderSpec, window: int | None) -> bool:
    """Whether layers with this window can read rows one by one: keys are plain, at the index of their positions."""
    return spec.alibi is None and not spec.has_sinks and not cache.sees_by_position and cache.stands_in_order(window)


class Flattening:
    """Decides for a decoder's passes whether their real tokens are concatenated."""

    def __init__(self, spec: DecoderSpec, device: torch.device, dtype: torch.dtype) -> None:
        self._spec = spec
        self._windows = {spec.window if kind == "sliding" else None for kind in spec.layer_kinds} or {None}
        self._device, self._dtype = device, dtype

    def flattens(self, cache: Cache, span: Span) -> bool:
        """Whether that saves more than it costs: padding, or the masks of filled attention."""
        num_real = sum(span.counts)
        if span.num_new == 1 or num_real < _LEAST_TOKENS:
            return False
        if len(span.counts) * span.num_new >= _LEAST_SAVED * num_real:
            return True
        if not any(self._saves_masks(cache, span, window) for window in self._windows):
            return False
        return span.num_new > BLOCK or self._has_kernel

    @cached_property
    def _has_kernel(self) -> bool:
        """Checked only if needed: torch takes a second or more to import its kernel."""
        return self._spec.attention_softcap is None and has_flash(self._device, self._dtype, self._spec.head_dim)

    def _saves_masks(self, cache: Cache, span: Span, window: int | None) -> bool:
        """Whether filled attention would need a mask (or scores) of all queries and keys, and row by row would not."""
        reaches_back = window is not None and span.stop > window
        needs_mask = self._spec.attention_softcap is not None or reaches_back or any(span.starts)
        return needs_mask and can_read_rows(cache, self._spec, window)
