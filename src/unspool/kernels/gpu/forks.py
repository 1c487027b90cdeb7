"""Taking one of several tried tokens over, in all layers at once: beside `BufferedCache.keep_fork`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from unspool.kernels.gpu.launching import launch, let_next_start, wait_for_input
from unspool.kernels.sending import send

BLOCK = 1024  # numbers a program moves


@triton.jit
def _keep_keys(
    BASE, TABLE, LENGTHS, CHOSEN, num_layers,
    POSITION: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A layer's keys of the kept token, from where they were tried to the row's end."""
    row, layer, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    at = part * BLOCK + tl.arange(0, BLOCK)
    let_next_start(PDL)
    wait_for_input(PDL)
    length, chosen = tl.load(LENGTHS + row), tl.load(CHOSEN + row)
    capacity = tl.load(TABLE + num_layers)
    into = BASE + tl.load(TABLE + layer) * UNIT + (row * capacity + length) * POSITION + at
    is_moved = (at < POSITION) & (chosen > 0) & (length >= 0)
    kept = tl.load(into + chosen * POSITION, mask=is_moved, other=0.0)
    tl.store(into, kept, mask=is_moved)


def keep_keys(
    base: torch.Tensor,  # of the buffers' dtype
    table: torch.Tensor,  # int64: where the layers' buffers lie, counted from `base` in units, and their capacity
    lengths: torch.Tensor,  # (rows,); below 0 for a row that is not there
    chosen: torch.Tensor,  # (rows,) int64: which of the tokens tried, which lie one after the other past the row's end
    *,
    num_layers: int,
    position: int,  # numbers that a position takes
    unit: int,
    **options: Any,
) -> None:
    """Move what the chosen tokens wrote to their rows' ends."""
    grid = (len(lengths), num_layers, triton.cdiv(position, BLOCK))
    settings = {"POSITION": position, "BLOCK": BLOCK, "UNIT": unit, **options}
    launch(_keep_keys, grid, base, table, lengths, chosen, num_layers, **settings)


class ForkKeeper:
    """Where the buffers (rows, capacity, 2, heads, width) of one cache lie, for as long as they stay there."""

    def __init__(self, buffers: Sequence[torch.Tensor]) -> None:
        first = buffers[0]
        self._base, self._num_layers = first, len(buffers)
        offsets = [(buffer.data_ptr() - first.data_ptr()) // first.element_size() for buffer in buffers]
        self._table = send([*offsets, first.shape[1]], first.device)

    def keep(self, chosen: torch.Tensor, lengths: Sequence[int]) -> None:
        """Move fork `chosen[row]` (rows,), which lies so many places past the row's end, to the end itself."""
        first = self._base
        ends, position = send(lengths, first.device), first.stride(1)
        settings = {"num_layers": self._num_layers, "position": position, "unit": 1, "PDL": False}
        keep_keys(first, self._table, ends, chosen.to(torch.int64), **settings)
