"""Draws from rows of scores in one call of the CPU library: temperature, top-k, top-p, min-p and the draw itself."""

from __future__ import annotations

import numpy as np
import torch

from unspool.kernels.cpu.library import DRAW, Draws, find_library


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
