"""The tokens before a token: windows of a text, and which of them stood there before."""

from __future__ import annotations

import torch


def take_windows(tokens: torch.Tensor, width: int) -> torch.Tensor:
    """Every window of `width` tokens (rows, length + 1, width): the one before each token and the one at the end.

    Zeros stand before the text.
    """
    return torch.nn.functional.pad(tokens, (width, 0)).unfold(1, width, 1)


def is_last_repeated(windows: torch.Tensor, first: int = 0, most: int | None = None) -> torch.Tensor:
    """Whether the last window (rows, windows, width) equals one of the `most` before it, from `first` on: (rows,)."""
    end = windows.shape[1] - 1
    begin = max(first, 0 if most is None else end - most)
    earlier = windows[:, begin:end]
    return (earlier == windows[:, -1:]).all(dim=-1).any(dim=-1)


def find_repeated(windows: torch.Tensor, most: int | None = None) -> torch.Tensor:
    """Which windows (rows, windows, width) equal one of the `most` before them: (rows, windows) bool."""
    found = torch.zeros(windows.shape[:2], dtype=torch.bool)
    for row, listed in enumerate(windows.tolist()):
        last_at: dict[tuple[int, ...], int] = {}
        for place, window in enumerate(map(tuple, listed)):
            before = last_at.get(window)
            found[row, place] = before is not None and (most is None or place - before <= most)
            last_at[window] = place
    return found.to(windows.device)
