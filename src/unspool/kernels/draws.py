"""Draws from rows of scores in one call of the CPU library: temperature, top-k, top-p, min-p and the draw itself."""

from __future__ import annotations

import numpy as np
import torch

from unspool.kernels.cpu.library import DRAW, NO_DRAW, Draws, Library, find_library


def new_draws(count: int) -> Draws:
    """Draws from so many rows that leave nothing out."""
    draws = np.zeros(count, dtype=DRAW)
    draws["temperature"] = draws["top_p"] = draws["fewest"] = 1
    draws["below"] = -np.inf
    return draws


def draw_rows(scores: torch.Tensor, draws: Draws, uniforms: torch.Tensor) -> torch.Tensor | None:
    """The tokens (rows,) that the numbers (rows,) in [0, 1) draw from scores (rows, vocab): `NO_DRAW` where there is
    none, `UNSURE` where rounding decides. None if there is no library for these scores."""
    library = find_library() if scores.device.type == "cpu" and scores.dtype == torch.float32 else None
    if library is None:
        return None
    draws["uniform"] = uniforms.numpy()
    return library.draw_rows(scores, draws).long()


class DrawCall:
    """Draws from step after step: what a call of the library needs lies ready, and costs nothing between two steps."""

    def __init__(self, library: Library, draws: Draws, uniforms: torch.Tensor) -> None:
        """Numbers (rows, steps) in [0, 1) decide."""
        self._library, self._uniforms = library, uniforms.numpy()
        self._draws, self._tokens = draws.copy(), np.full(len(draws), NO_DRAW, dtype=np.int32)

    def draw(self, scores: torch.Tensor, step: int) -> list[int]:
        """The rows' tokens from scores (rows, vocab) float32; `NO_DRAW` and `UNSURE` as `draw_rows` has them."""
        self._draws["uniform"] = self._uniforms[:, step]
        self._library.draw_into(scores, self._draws, self._tokens)
        tokens: list[int] = self._tokens.tolist()
        return tokens


def prepare_draws(draws: Draws, uniforms: torch.Tensor) -> DrawCall | None:
    """What draws on a CPU, one step after the other; None if there is no library."""
    library = find_library() if uniforms.device.type == "cpu" else None
    return None if library is None else DrawCall(library, draws, uniforms)
