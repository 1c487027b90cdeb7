"""Tensors as kernels over rows take them."""

from __future__ import annotations

import torch


def lay_in_rows(x: torch.Tensor) -> torch.Tensor:
    """The same numbers (rows, columns) with the columns of a row side by side; copied only if they are not."""
    return x if x.stride(1) == 1 else x.contiguous()


def find_step(values: torch.Tensor | None) -> int:
    """How far apart the settings (rows or 1, 1) of neighbouring rows are: 0 if all rows have one, or none has."""
    return 0 if values is None or len(values) == 1 else 1
