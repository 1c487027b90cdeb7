"""The tiling of a product of several rows: rules found on an H200 (`benchmarks/gpu_rows.py`)."""

from __future__ import annotations

from functools import cache
from typing import Final

import torch

from unspool.kernels.cpu.blocks import Kind
from unspool.kernels.gpu.products.rows_product import RowsTiling

MOST_ROWS: Final = 256  # more rows than this multiply an unpacked copy of the matrix
_MOST_SPLITS: Final = 16
_USUAL_PROCESSORS: Final = 132


def choose_rows_tiling(
    outputs: int, inputs: int, num_rows: int, kind: Kind | None, *, is_split: bool
) -> RowsTiling | None:
    """The tiling for a matrix (outputs, inputs), whose columns may be split or not; None if cuBLAS is faster."""
    if kind is None:
        return None
    rows = min(64, max(8, 1 << (num_rows - 1).bit_length()))
    if rows <= 16:
        tile, columns, warps, stages = 64, 32, 4, 4
    else:
        tile, columns, warps, stages = 128, 32, 8, 3
    steps = inputs // (8 if kind == "int4" else 4) // columns
    splits = 1
    if is_split:
        wanted = 2 * _count_processors() // (-(-outputs // tile) * -(-num_rows // rows))
        splits = max(1, min(_MOST_SPLITS, steps // 2, wanted))
    return RowsTiling(rows, tile, columns, splits, warps, stages)


@cache
def _count_processors() -> int:
    """The GPU's multiprocessors."""
    if not torch.cuda.is_available():
        return _USUAL_PROCESSORS
    return int(torch.cuda.get_device_properties().multi_processor_count)
