"""Taking one of several tried tokens over, in all layers at once: beside `BufferedCache.keep_fork`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from unspool.kernels.sending import send

BLOCK = 1024  # numbers a program moves


@triton.jit
def _keep(BASE, TABLE, LENGTHS, CHOSEN, row_stride, position_stride, BLOCK: tl.constexpr):
    row, layer, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    end = tl.load(LENGTHS + row)
    chosen = tl.load(CHOSEN + row)
    at = part * BLOCK + tl.arange(0, BLOCK)
    into = BASE + tl.load(TABLE + layer) + row * row_stride + end * position_stride + at
    is_moved = (at < position_stride) & (chosen > 0)
    kept = tl.load(into + chosen * position_stride, mask=is_moved, other=0.0)
    tl.store(into, kept, mask=is_moved)


class ForkKeeper:
    """Where the buffers (rows, capacity, 2, heads, width) of one cache lie, for as long as they stay there."""

    def __init__(self, buffers: Sequence[torch.Tensor]) -> None:
        first = buffers[0]
        self._base = first
        offsets = [(buffer.data_ptr() - first.data_ptr()) // first.element_size() for buffer in buffers]
        self._table = torch.tensor(offsets, dtype=torch.int64, device=first.device)

    def keep(self, chosen: torch.Tensor, lengths: Sequence[int]) -> None:
        """Move fork `chosen[row]` (rows,), which lies so many places past the row's end, to the end itself."""
        first = self._base
        ends = send(lengths, first.device)
        grid = (len(lengths), self._table.numel(), triton.cdiv(first.stride(1), BLOCK))
        _keep[grid](first, self._table, ends, chosen.to(torch.int64), first.stride(0), first.stride(1), BLOCK=BLOCK)
