"""Blocks of a paged cache copied to others, in all layers by one launch. The reference is `BlockPool._move`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
import triton
import triton.language as tl

from unspool.kernels.gpu.arguments import count_parts
from unspool.kernels.gpu.launching import launch
from unspool.kernels.sending import send

TILE: Final = 2048  # numbers that a program copies


@triton.jit
def _copy_blocks(BASE, TABLE, SOURCES, TARGETS, NUMBERS: tl.constexpr, TILE: tl.constexpr):
    """Copy part of a layer's block to another block."""
    pair, layer, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    buffer = BASE + tl.load(TABLE + layer)
    at = part * TILE + tl.arange(0, TILE)
    is_number = at < NUMBERS
    moved = tl.load(buffer + tl.load(SOURCES + pair) * NUMBERS + at, mask=is_number, other=0.0)
    tl.store(buffer + tl.load(TARGETS + pair) * NUMBERS + at, moved, mask=is_number)


class BlockMover:
    """The addresses of all layers' blocks (blocks, block size, 2, heads, width), valid until they move."""

    def __init__(self, buffers: Sequence[torch.Tensor]) -> None:
        first = buffers[0]
        self._base, self._num_layers, self._numbers = first, len(buffers), first.stride(0)
        offsets = [(buffer.data_ptr() - first.data_ptr()) // first.element_size() for buffer in buffers]
        self._table = send(offsets, first.device)

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy blocks `sources` to `targets`; no block is in both."""
        device, numbers = self._base.device, self._numbers
        grid = (len(targets), self._num_layers, count_parts(numbers, TILE))
        first = len(sources) + len(sources) % 2  # of the targets: at a multiple of 16 bytes, for one kernel's sake
        sent = send([*sources, *[0] * (first - len(sources)), *targets], device)
        launch(_copy_blocks, grid, self._base, self._table, sent, sent[first:], NUMBERS=numbers, TILE=TILE)
