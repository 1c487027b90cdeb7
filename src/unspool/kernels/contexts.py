"""The part of a text that a watermark's key is mixed with."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from unspool.errors import SettingError


@dataclass(frozen=True, slots=True)
class Text:
    """Which columns of token ids (rows, columns) are text, and which of its windows count as used.

    Window `t` is the `width` tokens before token `t` of the text; zeros stand before it.
    """

    ids: torch.Tensor  # (rows, columns) int64
    start: int  # the first column of the text
    width: int  # of a window
    first: int  # the first window that counts
    pads: torch.Tensor | None = None  # (rows,): columns of padding, which are read as zeros
    firsts: torch.Tensor | None = None  # (rows,) int64: each row's own first window that counts, in place of `first`

    def __post_init__(self) -> None:
        columns = self.ids.shape[-1]
        if self.ids.dim() != 2 or not (0 <= self.start <= columns < 1 << 31 and self.width >= 1 and self.first >= 0):
            raise SettingError(f"windows of {self.width} can't be read from column {self.start} of {columns} on")
