"""The tiling of a product of several rows: rules found on an H200, 2026-11-16 (`benchmarks/gpu_rows.py`)."""

from __future__ import annotations

from functools import cache
from typing import Final

import torch

from unspool.kernels.gpu.products.rows_product import RowsTiling
from unspool.kernels.gpu.products.words import WordKind

MOST_ROWS: Final = 256  # more rows than this multiply an unpacked copy of the matrix
_MOST_PLAIN: Final = 64  # rows of a product of plain numbers
_WIDE: Final = 65_536  # outputs: a head
_FEW: Final = 8  # rows
_SOME: Final = 16  # rows: up to here a program's products are small ones
_MANY: Final = 64  # rows
_MOST_SPLITS: Final = 8
_LARGE_BYTES: Final = 200_000  # shared memory of a program, as data centres' GPUs have it
_USUAL_PROCESSORS: Final = 132

_Tile = tuple[int, int, int, int]  # outputs, columns, warps, stages
_LARGE: Final[_Tile] = (128, 128, 8, 4)
_USUAL: Final[_Tile] = (64, 128, 4, 4)
_SMALL: Final[_Tile] = (64, 128, 4, 2)  # where shared memory is short


def choose_rows_tiling(
    outputs: int,
    inputs: int,
    num_rows: int,
    kind: WordKind | None,
    *,
    is_gated: bool = False,
    is_split: bool = False,
) -> RowsTiling | None:
    """The tiling for a matrix (outputs, inputs), both halves counted if it is gated; None if cuBLAS is faster.

    Its columns may be split among programs or not.
    """
    if kind is None:
        return _choose_plain(outputs, inputs, num_rows)
    rows = min(_MANY, max(_SOME, 1 << (num_rows - 1).bit_length()))
    outputs //= 2 if is_gated else 1

    def fit(tile: _Tile, rows: int = rows) -> RowsTiling:
        programs = -(-outputs // tile[0]) * -(-num_rows // rows)
        wanted = min(_MOST_SPLITS, inputs // tile[1], 4 * _count_processors() // programs) if is_split else 1
        splits = 1 << (max(1, wanted).bit_length() - 1)  # a power of two: few variants of the kernel that adds them up
        words = tile[1] * (4 if kind == "int4" else 8) // 32
        return RowsTiling(rows, tile[0], words, splits, tile[2], tile[3])

    if rows <= _SOME:
        return fit((64, 256, 4, 3))
    if not _has_large_memory():
        return fit(_SMALL)
    large = fit(_LARGE)
    programs = -(-outputs // large.outputs) * -(-num_rows // rows) * large.splits
    return large if programs >= 3 * _count_processors() // 4 else fit(_USUAL)


def _choose_plain(outputs: int, inputs: int, num_rows: int) -> RowsTiling | None:
    """The tiling of a head, which cuBLAS multiplies as fast but writes in 16 bits; None for everything else.

    In chains of whole layers ours and cuBLAS' products, each with what a block needs beside it, take the same time.
    """
    if outputs < _WIDE or num_rows > _MOST_PLAIN or inputs % 128:
        return None
    if num_rows <= _SOME:
        return RowsTiling(8 if num_rows <= _FEW else 16, 64, 128, 1, 4, 4)
    return RowsTiling(32 if num_rows <= _MANY // 2 else 64, 64, 64, 1, 4, 5)


@cache
def _count_processors() -> int:
    """The GPU's multiprocessors."""
    if not torch.cuda.is_available():
        return _USUAL_PROCESSORS
    return int(torch.cuda.get_device_properties().multi_processor_count)


@cache
def _has_large_memory() -> bool:
    """Whether a program may take as much shared memory as the large tiles need."""
    if not torch.cuda.is_available():
        return True
    return getattr(torch.cuda.get_device_properties(), "shared_memory_per_block_optin", 0) >= _LARGE_BYTES
