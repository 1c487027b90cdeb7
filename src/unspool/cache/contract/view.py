"""Which keys the queries of a pass see."""

from __future__ import annotations

import torch

from unspool.cache.span import Mask, Span, see_positions


class KeysInView:
    """The keys that a pass reads; by default every key stands at the index of its position."""

    is_in_order: bool = True  # the keys in view stand at the indices of their positions, for all rows alike

    @property
    def sees_by_position(self) -> bool:
        """Whether keys are packed, and their attention works out itself what may be seen."""
        return False

    def mask(self, span: Span, window: int | None = None) -> Mask:
        """What the span's queries may see among the `span.stop` keys in view."""
        return see_positions(span, window)

    def stands_in_order(self, window: int | None) -> bool:  # kinds that hold windows apart ask
        """Whether layers with that window (None: without one) find every key at the index of its position."""
        return self.is_in_order

    def key_positions(self, span: Span, window: int | None = None) -> torch.Tensor:
        """The position of every key in view of layers with that window: (rows or 1, keys)."""
        return torch.arange(span.stop, device=span.positions.device)[None]

    def order_weights(self, weights: torch.Tensor) -> torch.Tensor:
        """Attention weights (rows, heads, new, keys in view) with a key's weight at the index of its position."""
        return weights
