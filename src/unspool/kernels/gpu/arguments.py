"""Tensors and sizes as kernels over rows take them; Triton's own counts take a microsecond each on the host."""

from __future__ import annotations

import torch


def lay_in_rows(x: torch.Tensor) -> torch.Tensor:
    """The same numbers (rows, columns) with the columns of a row side by side; copied only if they are not."""
    return x if x.stride(1) == 1 else x.contiguous()


def find_step(values: torch.Tensor | None) -> int:
    """How far apart the settings (rows or 1, 1) of neighbouring rows are: 0 if all rows have one, or none has."""
    return 0 if values is None or len(values) == 1 else 1


def count_parts(length: int, size: int) -> int:
    """How many parts of a size a length has, the last of which may be shorter."""
    return -(-length // size)


def round_up(count: int) -> int:
    """The smallest power of two that is no less."""
    return 1 << (count - 1).bit_length() if count > 1 else 1
