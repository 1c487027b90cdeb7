"""What the queries of one pass look through where keys are packed."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from unspool.cache.span import Mask, Span
from unspool.kernels.packed_keys import PackedView


@dataclass(slots=True)
class NearView:
    """The view of layers with a window: rows count their keys from bases of their own."""

    view: PackedView
    bases: list[int]  # the position of each row's first key

    def mask(self, span: Span, window: int) -> Mask:
        """Which of the keys each query sees, by the rows' own indices."""
        queries = self.view.positions[:, None, :, None]
        keys = torch.arange(self._count_kept(span), device=queries.device)
        return (keys <= queries) & (keys > queries - window)

    def key_positions(self, span: Span) -> torch.Tensor:
        """The position of every key in view (rows, keys)."""
        bases = span.positions[:, :1] - self.view.positions[:, :1]
        return bases + torch.arange(self._count_kept(span), device=bases.device)

    def _count_kept(self, span: Span) -> int:
        """Keys in view, of the row that has the most."""
        return max(start - base for start, base in zip(span.starts, self.bases, strict=True)) + span.num_new


@dataclass(slots=True)
class PassView:
    """One pass over packed layers."""

    view: PackedView
    near: NearView | None  # of layers with a window
    columns: torch.Tensor | None  # slots that the pass writes, if it reads buffers whole

    @property
    def near_view(self) -> PackedView | None:
        """What layers with a window are seen through."""
        return None if self.near is None else self.near.view


class SentNumbers:
    """A number per row on a device, which is sent when it has changed and not once a step."""

    def __init__(self, rows: int | None) -> None:
        self._rows = rows or 0  # it stays where it is for so many
        self._numbers: list[int] = []
        self._buffer: torch.Tensor | None = None

    def send(self, numbers: list[int], device: torch.device) -> torch.Tensor:
        """The numbers on the device: (rows,) int32."""
        buffer, rows = self._buffer, len(numbers)
        if buffer is None or buffer.device != device or rows > len(buffer):
            with torch.inference_mode(False):  # or it could not be changed outside of that mode
                self._buffer = buffer = torch.zeros(max(rows, self._rows), dtype=torch.int32, device=device)
            self._numbers = []
        if numbers != self._numbers:
            buffer[:rows] = torch.tensor(numbers, dtype=torch.int32)
            self._numbers = list(numbers)
        return buffer[:rows]
