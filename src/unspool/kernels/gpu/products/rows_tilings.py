"""The tiling of a product of several rows: rules found on an H200 (`benchmarks/gpu_rows.py`)."""

from __future__ import annotations

from functools import cache
from typing import Final

import torch

from unspool.kernels.cpu.blocks import Kind
from unspool.kernels.gpu.products.rows_product import RowsTiling

MOST_ROWS: Final = 256  # more rows than this multiply an unpacked copy of the matrix
_MOST_PLAIN: Final = 64  # rows: with more of them cuBLAS is faster
_FEWEST_OUTPUTS, _FEWEST_INPUTS, _PLAIN_COLUMNS = 2048, 1024, 128  # of plain matrices; others were not measured
_MOST_TOGETHER: Final = 64  # rows of a program
_FEW: Final = 16  # rows
_MOST_SPLITS: Final = 8
_USUAL_PROCESSORS: Final = 132

# outputs, columns (or words), warps, stages, cache lines ahead; for few rows and for many
_TILES: Final[dict[Kind | None, tuple[tuple[int, ...], tuple[int, ...]]]] = {
    None: ((64, 128, 4, 4, 8), (64, 64, 4, 5, 8)),
    "int4": ((64, 64, 4, 3, 4), (64, 32, 4, 2, 4)),
    "int8": ((64, 64, 4, 3, 4), (128, 32, 8, 3, 4)),
}


def choose_rows_tiling(
    outputs: int, inputs: int, num_rows: int, kind: Kind | None, *, is_split: bool
) -> RowsTiling | None:
    """The tiling for a matrix (outputs, inputs), whose columns may be split or not; None if cuBLAS is faster."""
    if kind is None and (
        num_rows > _MOST_PLAIN or outputs < _FEWEST_OUTPUTS or inputs < _FEWEST_INPUTS or inputs % _PLAIN_COLUMNS
    ):
        return None
    rows = min(_MOST_TOGETHER, max(8, 1 << (num_rows - 1).bit_length()))
    tile, columns, warps, stages, ahead = _TILES[kind][rows > _FEW]
    splits = 1
    if is_split:
        steps = inputs // {None: 1, "int8": 4, "int4": 8}[kind] // columns
        programs = -(-outputs // tile) * -(-num_rows // rows)
        wanted = max(1, min(_MOST_SPLITS, steps // 2, 3 * _count_processors() // (2 * programs)))
        splits = 1 << (wanted.bit_length() - 1)  # a power of two: few variants of the kernel that adds them up
    return RowsTiling(rows, tile, columns, splits, warps, stages, ahead)


@cache
def _count_processors() -> int:
    """The GPU's multiprocessors."""
    if not torch.cuda.is_available():
        return _USUAL_PROCESSORS
    return int(torch.cuda.get_device_properties().multi_processor_count)
