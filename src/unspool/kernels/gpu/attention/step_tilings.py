"""How a step's attention splits keys among programs: the tilings that were measured, and what fits.

Measured inside whole passes (`benchmarks/gpu_attention.py`): a program that takes much shared memory keeps the next
kernel's out, which a measurement of attention alone doesn't show.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Final

import torch
import triton

from unspool.kernels.gpu.attention.split_attention import SMALLEST_DOT, HeadShape
from unspool.kernels.key_layout import KeyLayout

MOST_SPLITS: Final = 32
NARROW: Final = 64  # numbers per head
USUAL: Final = 128  # numbers per head
FEW_HEADS: Final = 16
LARGEST_BLOCK_BYTES: Final = 32_768  # of keys; there are as many of values
USUAL_SHARED_BYTES: Final = 98_304  # if the GPU does not report its limit per program


@dataclass(frozen=True, slots=True)
class AttentionTiling:
    """How keys are split: keys per tile, the fewest keys per program, and the number of programs."""

    block: int
    chunk: int
    programs: int
    warps: int
    stages: int
    registers: int | None = None  # the most per thread: fewer leave room for other kernels beside this one
    cluster: int = 1  # neighbouring programs that combine their parts in shared memory, if these have all keys
    is_eager: bool = False  # the first keys are loaded before the queries are there


ONE_ROW: Final = AttentionTiling(64, 64, 256, 4, 2)
ONE_ROW_IN_CLUSTERS: Final = AttentionTiling(64, 64, 256, 4, 2, None, 8)  # Llama-3.2-1B, Qwen3-0.6B: 5 % of a step
# The first keys early: 1 to 6 % of a step if every query head has keys of its own, nothing or less if heads share.
ONE_ROW_OF_LONE_HEADS: Final = AttentionTiling(64, 64, 256, 4, 2, is_eager=True)
ONE_ROW_OF_SMALL_LONE_HEADS: Final = AttentionTiling(64, 64, 256, 4, 2, None, 8, is_eager=True)  # Phi-2: 2 %
ONE_ROW_OF_WIDE_HEADS: Final = AttentionTiling(64, 64, 256, 8, 1, None, 8, is_eager=True)  # Gemma 2 and 3: 4 and 7 %
SEVERAL_ROWS: Final = AttentionTiling(64, 128, 256, 4, 2)
SEVERAL_ROWS_OF_NARROW_HEADS: Final = AttentionTiling(64, 64, 256, 4, 3)


def count_splits(wanted: int) -> int:
    """The number of programs that share a row's keys: a power of two."""
    return min(MOST_SPLITS, 1 << (max(1, wanted).bit_length() - 1))


def pad_width(shape: HeadShape) -> int:
    """A head's width, padded to a power of two as a kernel's tile needs it."""
    return int(max(SMALLEST_DOT, triton.next_power_of_2(shape.width)))


def choose_tiling(rows: int, shape: HeadShape) -> AttentionTiling:
    """The best tiling measured on an H200."""
    if rows == 1:
        if shape.width <= NARROW:
            return ONE_ROW_IN_CLUSTERS
        if shape.width > USUAL:
            return ONE_ROW_OF_WIDE_HEADS
        if shape.kv_heads == shape.heads:
            return ONE_ROW_OF_LONE_HEADS if shape.width == USUAL else ONE_ROW_OF_SMALL_LONE_HEADS
        return ONE_ROW_IN_CLUSTERS if shape.heads <= FEW_HEADS else ONE_ROW
    return SEVERAL_ROWS if shape.width > NARROW else SEVERAL_ROWS_OF_NARROW_HEADS


def fit_memory(tiling: AttentionTiling, head_bytes: int, layout: KeyLayout) -> tuple[int, int]:
    """Keys per tile and the number of tiles in flight that fit into shared memory.

    A tile is part of one block of a paged cache, whose index is loaded first: Triton then counts stages twice.
    """
    block, stages = max(16, min(tiling.block, LARGEST_BLOCK_BYTES // head_bytes)), tiling.stages
    if layout.block_size:
        block = min(block, layout.block_size)
    stages = max(1, min(stages, _find_shared_bytes() // (2 * block * head_bytes)))
    return block, 2 * stages - 1 if layout.block_size else stages


@cache
def _find_shared_bytes() -> int:
    """Shared memory for keys and values in flight, with some left for the rest."""
    if not torch.cuda.is_available():
        return USUAL_SHARED_BYTES
    properties = torch.cuda.get_device_properties()
    return int(getattr(properties, "shared_memory_per_block_optin", USUAL_SHARED_BYTES) * 7 // 8)
