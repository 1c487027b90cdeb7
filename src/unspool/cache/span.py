"""Where one forward pass writes, and what its queries may see."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from unspool.kernels.sending import send

Mask = torch.Tensor | Literal["causal"] | None
"""What a layer's queries may see: a boolean tensor (rows or 1, 1, new, keys), plain causal, or everything."""


@dataclass(slots=True)
class Span:
    """Where one forward pass writes: the positions that follow what each row holds."""

    starts: list[int]
    num_new: int
    counts: list[int]  # how many of the new positions are real, one per row
    stop: int  # keys in view: the longest row, the new positions included
    is_uniform: bool  # all rows start at the same position
    placed: torch.Tensor | None = None  # the positions, once they were asked for, or if they are others
    device: torch.device | str = "cpu"

    @property
    def positions(self) -> torch.Tensor:
        """The new positions: (rows, new) int64."""
        if self.placed is None:
            column = torch.arange(self.num_new, device=self.device)
            if self.is_uniform:
                self.placed = (column + self.starts[0]).expand(len(self.starts), self.num_new)
            else:
                self.placed = send(self.starts, torch.device(self.device))[:, None] + column
        return self.placed


def see_positions(span: Span, window: int | None = None) -> Mask:
    """What a span's queries see among keys that stand at the indices of their positions."""
    reaches_back = window is not None and span.stop > window
    if not reaches_back and span.is_uniform:
        if span.num_new == 1:
            return None
        if span.starts[0] == 0:
            return "causal"
    keys = torch.arange(span.stop, device=span.positions.device)
    queries = (span.positions[:1] if span.is_uniform else span.positions)[:, None, :, None]
    visible = keys <= queries  # (rows or 1, 1, new, keys)
    if reaches_back:
        assert window is not None
        visible &= keys > queries - window
    return visible
