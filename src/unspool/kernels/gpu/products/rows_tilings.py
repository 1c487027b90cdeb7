"""The tiling of a product of several rows: rules found on an H200, 2026-11-16 (`benchmarks/gpu_rows.py`)."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Final

import torch

from unspool.kernels.gpu.launching import is_hopper
from unspool.kernels.gpu.products.rows_product import RowsTiling
from unspool.kernels.gpu.products.words import WordKind

MOST_ROWS: Final = 256  # more rows than this multiply an unpacked copy of the matrix
_MOST_PLAIN: Final = 64  # rows of a product of plain numbers
_WIDE: Final = 65_536  # outputs: a head
_ALIGNED: Final = 8  # outputs: cuBLAS is two to six times slower if their number is no multiple of it,
_UNEVEN: Final = 16_384  # which was measured for heads of at least so many
_FEW: Final = 8  # rows
_SOME: Final = 16  # rows: up to here a program's products are small ones
_MANY: Final = 64  # rows
MOST_SPLITS: Final = 8
_LARGE_BYTES: Final = 200_000  # shared memory of a program, as data centres' GPUs have it
_USUAL_PROCESSORS: Final = 132

_WIDTH: Final = 128  # columns of a tile that is copied early

_Tile = tuple[int, int, int, int]  # outputs, columns, warps, stages
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
    outputs //= 2 if is_gated else 1
    if kind is None:
        return _choose_plain(outputs, inputs, num_rows, is_gated=is_gated, is_split=is_split)
    is_whole = inputs % _WIDTH == 0 and outputs % _WIDTH == 0
    if kind != "int4" and _SOME < num_rows <= _MANY and is_whole and starts_early():
        return _choose_early_words(outputs, inputs, num_rows, kind, is_gated=is_gated, is_split=is_split)
    rows = min(_MANY, max(_SOME, 1 << (num_rows - 1).bit_length()))
    if num_rows > _MANY:
        rows = 2 * _MANY
    tile = _choose_tile(outputs, rows, kind, is_gated=is_gated, is_split=is_split)
    splits = _count_splits(outputs, inputs, num_rows, rows, tile) if is_split else 1
    return RowsTiling(rows, tile[0], tile[1] * (4 if kind == "int4" else 8) // 32, splits, tile[2], tile[3])


def _choose_early_words(
    outputs: int, inputs: int, num_rows: int, kind: WordKind, *, is_gated: bool, is_split: bool
) -> RowsTiling:
    """The tiling of 8-bit words that are on their way before the rows are there (`early_words`)."""
    rows, warps, stages, beside = 1 << (num_rows - 1).bit_length(), 8, 4 if is_gated or outputs >= _WIDE else 5, 1
    if kind == "int8":  # of two programs to a processor one unpacks while the other multiplies; fp8 is slower so
        warps, stages, beside = 4, 4, 2
        if is_gated:
            stages = 3 if outputs > 64 * _count_processors() else 5
    steps, splits = inputs // _WIDTH, 1
    if is_split and not is_gated:
        splits = _count_splits(outputs, inputs, num_rows, rows, (16 * warps, _WIDTH, warps, stages), beside)
    while -(-steps // -(-steps // splits)) < splits:  # every part has columns
        splits //= 2
    return RowsTiling(rows, 16 * warps, _WIDTH // 4, splits, warps, stages, is_early=True)


def _choose_tile(outputs: int, rows: int, kind: WordKind, *, is_gated: bool, is_split: bool) -> _Tile:
    """The tile of a program that unpacks words."""
    if not _has_large_memory():
        return _SMALL
    if rows > _MANY:
        return (128, 128, 8, 3)
    is_large = outputs >= 128 * 3 * _count_processors() // 4  # enough programs of 128 outputs
    if kind == "int4":
        if is_gated and is_large:
            return (128, 256, 8, 3)
        if rows <= _SOME:
            return (64, 256, 4, 5)
        return (64, 256, 4, 3) if is_gated or is_split else (64, 128, 4, 5)
    if outputs >= _WIDE:
        return (64, 256, 4, 3) if rows <= _SOME else (128, 128, 8, 3)
    if rows <= _SOME:
        return (64, 128, 4, 8) if is_gated else (64, 256, 4, 4)
    return (64, 128, 4, 5)


def _count_splits(outputs: int, inputs: int, num_rows: int, rows: int, tile: _Tile, beside: int = 1) -> int:
    """Among how many programs columns are split: a power of two, so that the sums have few variants.

    A processor has room for so many programs `beside` each other; for two of a few rows.
    """
    programs = -(-outputs // tile[0]) * -(-num_rows // rows)
    room = _count_processors() * (2 if rows <= _SOME else beside)
    wanted = min(MOST_SPLITS, inputs // tile[1], room // programs)
    return 1 << (max(1, wanted).bit_length() - 1)


def _choose_plain(outputs: int, inputs: int, num_rows: int, *, is_gated: bool, is_split: bool) -> RowsTiling | None:
    """The tiling of a matrix of plain numbers; None if cuBLAS is faster, or the numbers make no whole tiles."""
    is_uneven = outputs >= _UNEVEN and outputs % _ALIGNED > 0 and _has_large_memory()
    if inputs % _WIDTH or num_rows > (MOST_ROWS if is_uneven else _MOST_PLAIN):
        return None
    if num_rows > _MOST_PLAIN:
        return RowsTiling(2 * _MANY, 128, 64, 1, 8, 3)
    rows = 8 if num_rows <= _FEW else max(_SOME, 1 << (num_rows - 1).bit_length())
    is_head, is_few = outputs >= _WIDE or is_uneven, rows <= _SOME
    if is_head and not (is_few and starts_early()):  # ours writes float32: cuBLAS' needs a pass over the logits more
        return RowsTiling(rows, 64, 128 if is_few else 64, 1, 4, 4 if is_few else 5)
    if not starts_early() or not (is_few or is_gated or is_split):
        return None
    tile = (64, _WIDTH, 4, 3 if is_gated else 4 if is_head or not is_few else 6)
    splits = _count_splits(outputs, inputs, num_rows, rows, tile) if is_split and not is_gated else 1
    return RowsTiling(rows, tile[0], tile[1], splits, tile[2], tile[3], is_early=True)


@cache
def starts_early() -> bool:
    """Whether there is a kernel that copies tiles before its input is there: on Hopper, with Triton's Gluon."""
    if not is_hopper():
        return False
    try:
        importlib.import_module("unspool.kernels.gpu.products.early_product")
    except ImportError:
        return False
    return True


@cache
def _count_processors() -> int:
    """The GPU's multiprocessors."""
    if not torch.cuda.is_available():
        return _USUAL_PROCESSORS
    return int(torch.cuda.get_device_properties().multi_processor_count)


@cache
def _has_large_memory() -> bool:
    """Whether a program may use as much shared memory as the large tiles need."""
    if not torch.cuda.is_available():
        return True
    properties = torch.cuda.get_device_properties()
    return int(getattr(properties, "shared_memory_per_block_optin", 0)) >= _LARGE_BYTES
