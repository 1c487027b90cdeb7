"""Keeping one of several forks, in all layers at once. The reference is `BufferedCache.keep_fork`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from unspool.kernels.gpu.arguments import count_parts
from unspool.kernels.gpu.attention.key_lookup import find_keys, find_new, find_row
from unspool.kernels.gpu.launching import launch, let_next_start, wait_for_input
from unspool.kernels.key_layout import PLAIN, KeyLayout
from unspool.kernels.sending import send

BLOCK = 1024  # numbers that a program moves


@triton.jit
def _keep_keys(
    BASE, TABLE, LENGTHS, CHOSEN, num_layers,
    POSITION: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr, PAGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Move a layer's keys of the kept fork to the row's end."""
    row, layer, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    at = part * BLOCK + tl.arange(0, BLOCK)
    let_next_start(PDL)
    wait_for_input(PDL)
    length, chosen = tl.load(LENGTHS + row), tl.load(CHOSEN + row)
    own, apart, shared, shared_apart, num_shared, listed = find_row(
        BASE, TABLE, LENGTHS, layer, num_layers, row, POSITION, UNIT, 0, PAGE
    )
    is_moved = (at < POSITION) & (chosen > 0) & (length >= 0)
    is_there = length >= 0
    tried = find_keys(
        row, length + chosen, is_there, own, apart, shared, shared_apart, num_shared, listed, POSITION, 0, PAGE
    )
    into, _ = find_new(row, length, is_there, own, apart, num_shared, listed, POSITION, PAGE)
    kept = tl.load(tried + at, mask=is_moved, other=0.0)
    tl.store(into + at, kept, mask=is_moved)


def keep_keys(
    base: torch.Tensor,  # of the buffers' dtype
    table: torch.Tensor,  # int64: see `kernels.key_layout`
    lengths: torch.Tensor,  # (rows,) int32; negative for an absent row
    chosen: torch.Tensor,  # (rows,) int64: index of the kept fork; forks follow one another past the row's end
    *,
    num_layers: int,
    position: int,  # numbers per position
    unit: int,
    layout: KeyLayout = PLAIN,
    **options: Any,
) -> None:
    """Move the keys of the chosen forks to their rows' ends."""
    grid = (len(lengths), num_layers, count_parts(position, BLOCK))
    settings = {"POSITION": position, "BLOCK": BLOCK, "UNIT": unit, "PAGE": layout.block_size, **options}
    launch(_keep_keys, grid, base, table, lengths, chosen, num_layers, **settings)


class ForkKeeper:
    """The addresses of a cache's buffers (rows or blocks, positions, 2, heads, width), valid until they move."""

    def __init__(self, buffers: Sequence[torch.Tensor], block_table: torch.Tensor | None = None) -> None:
        first = buffers[0]
        self._base, self._num_layers, self._layout = first, len(buffers), PLAIN
        entries = [(buffer.data_ptr() - first.data_ptr()) // first.element_size() for buffer in buffers]
        entries.append(first.shape[1])
        self._ends: torch.Tensor | None = None  # indices are offsets from it
        if block_table is not None:
            self._layout = KeyLayout(block_size=first.shape[1])
            self._ends = torch.empty(block_table.shape[0], dtype=torch.int32, device=first.device)
            entries += [(block_table.data_ptr() - self._ends.data_ptr()) // 4, block_table.shape[1]]
        self._table = send(entries, first.device)

    def keep(self, chosen: torch.Tensor, lengths: Sequence[int]) -> None:
        """Move fork `chosen[row]` (rows,), which is that many positions past the row's end, to the end itself."""
        first = self._base
        ends = send(lengths, first.device, torch.int32)
        if self._ends is not None:
            ends = self._ends[: len(lengths)].copy_(ends)
        keep_keys(
            first,
            self._table,
            ends,
            chosen.to(torch.int64),
            num_layers=self._num_layers,
            position=first.stride(1),
            unit=1,
            layout=self._layout,
            PDL=False,
        )
