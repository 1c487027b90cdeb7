"""The tokens before a token: windows of a text, and which of them stood there before."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch

from unspool.kernels.contexts import Text
from unspool.kernels.cpu import find_marks
from unspool.kernels.presence import runs_kernels


def read_contexts(
    text: Text, seed: int, hash_plainly: Callable[[torch.Tensor], torch.Tensor], *, mixes: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The hash (rows,) int64 of each row's last window, and whether an earlier one that counts equals it: (rows,).

    Hashes begin with `seed`, and mix tokens in as Gumbel's noise wants them, or else by SynthID-Text's generator;
    `hash_plainly` is the same of windows (rows, width), for devices without a kernel.
    """
    if runs_kernels(text.ids.device):
        from unspool.kernels.gpu.marks import contexts  # Triton is imported where a GPU is used

        return contexts.read_contexts(text, send_key(seed, text.ids.device), mixes=mixes)
    marks = find_marks() if text.ids.device.type == "cpu" else None
    if marks is not None:
        return marks.read_contexts(text, seed, mixes=mixes)
    ids = text.ids
    if text.pads is not None:
        ids = ids.masked_fill(torch.arange(ids.shape[-1], device=ids.device) < text.pads[:, None], 0)
    windows = take_windows(ids[:, text.start :], text.width)
    return hash_plainly(windows[:, -1]), is_last_repeated(windows, text.first if text.firsts is None else text.firsts)


@lru_cache(maxsize=64)
def send_key(key: int, device: torch.device) -> torch.Tensor:
    """A number (1,) where kernels read it: as an argument of theirs it would be compiled in."""
    return torch.tensor([key], device=device)


def take_windows(tokens: torch.Tensor, width: int) -> torch.Tensor:
    """Every window of `width` tokens (rows, length + 1, width): the one before each token and the one at the end.

    Zeros stand before the text.
    """
    return torch.nn.functional.pad(tokens, (width, 0)).unfold(1, width, 1)


def is_last_repeated(windows: torch.Tensor, first: int | torch.Tensor = 0) -> torch.Tensor:
    """Whether the last window (rows, windows, width) equals one before it, from `first` on, which may be each row's
    own (rows,): (rows,)."""
    if isinstance(first, int):
        return (windows[:, first:-1] == windows[:, -1:]).all(dim=-1).any(dim=-1)
    is_same = (windows[:, :-1] == windows[:, -1:]).all(dim=-1)
    return (is_same & (torch.arange(is_same.shape[1], device=first.device) >= first[:, None])).any(dim=-1)


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
