"""When each token was spoken: the cross-attention of chosen heads, followed by dynamic time warping."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

SECONDS_PER_POSITION = 0.02
MEDIAN_WIDTH = 7


def find_times(
    attentions: Sequence[torch.Tensor], heads: Sequence[tuple[int, int]], num_prompt: int, num_positions: int | None
) -> list[float]:
    """Seconds at which the tokens after the prompt are over, by cross-attentions (heads, tokens, source) of each layer.

    `num_positions` is how much of the source is sound; None: all of it.
    """
    weights = torch.stack([attentions[layer][head] for layer, head in heads])[:, num_prompt:, :num_positions].float()
    if weights.shape[1] < 2 or weights.shape[2] == 0:  # nothing to compare with, or no sound
        return [0.0] * weights.shape[1]
    spread, mean = torch.std_mean(weights, dim=-2, keepdim=True, unbiased=False)
    smooth = smooth_median((weights - mean) / spread, MEDIAN_WIDTH).mean(dim=0)  # (tokens, source)
    text, time = warp(-smooth.double().cpu().numpy())
    is_first = np.diff(text, prepend=text[0] - 1) > 0
    return [float(step) * SECONDS_PER_POSITION for step in time[is_first]]


def smooth_median(values: torch.Tensor, width: int) -> torch.Tensor:
    """The median of each value and its neighbours along the last dimension; edges are mirrored."""
    half = width // 2
    if values.shape[-1] <= half:
        return values
    padded = F.pad(values, (half, half), mode="reflect")
    return padded.unfold(-1, width, 1).sort().values[..., half]


def warp(costs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The cheapest path through a matrix (tokens, source) that goes right, down or both: its rows and its columns.

    A diagonal holds what can be computed at once.
    """
    num_rows, num_columns = costs.shape
    total = np.full((num_rows + 1, num_columns + 1), np.inf, np.float32)
    total[0, 0] = 0
    step = np.zeros((num_rows + 1, num_columns + 1), np.int8)  # 0: both, 1: down, 2: right
    step[0, :], step[:, 0] = 2, 1
    for diagonal in range(2, num_rows + num_columns + 1):
        row = np.arange(max(1, diagonal - num_columns), min(num_rows, diagonal - 1) + 1)
        column = diagonal - row
        both, down, right = total[row - 1, column - 1], total[row - 1, column], total[row, column - 1]
        takes_both = (both < down) & (both < right)
        takes_down = ~takes_both & (down < both) & (down < right)
        step[row, column] = np.where(takes_both, 0, np.where(takes_down, 1, 2))
        cheapest = np.where(takes_both, both, np.where(takes_down, down, right))
        total[row, column] = costs[row - 1, column - 1] + cheapest
    rows, columns = [], []
    row, column = num_rows, num_columns
    while row > 0 or column > 0:
        rows.append(row - 1)
        columns.append(column - 1)
        taken = step[row, column]
        row -= int(taken != 2)
        column -= int(taken != 1)
    return np.array(rows[::-1]), np.array(columns[::-1])
