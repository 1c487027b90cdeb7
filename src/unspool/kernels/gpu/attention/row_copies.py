"""Rows of a cache copied to others, in all layers by one launch: what beams do that change places.

The reference is `PlainStore.copy_rows`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
import triton
import triton.language as tl

from unspool.kernels.gpu.arguments import count_parts, round_up
from unspool.kernels.gpu.launching import launch
from unspool.kernels.sending import send

NUMBERS: Final = 8192  # that a program holds at a time
MOST_ROWS: Final = 64


@triton.jit(do_not_specialize=["begin", "end", "num_moved"])
def _copy_rows(
    BASE, TABLE, MOVED, apart, begin, end, num_moved,
    ROWS: tl.constexpr, TILE: tl.constexpr, HAS_TARGETS: tl.constexpr,
):  # fmt: skip
    """Copy part of a layer's rows: those that are read may be written too, so all of them are read first. Without
    targets the first rows become what sources are, but for those that are their own."""
    layer, part = tl.program_id(0), tl.program_id(1)
    buffer = BASE + tl.load(TABLE + layer)
    row, at = tl.arange(0, ROWS), begin + part * TILE + tl.arange(0, TILE)
    sources, targets = tl.load(MOVED + row, mask=row < num_moved, other=0), row.to(tl.int64)
    if HAS_TARGETS:
        targets = tl.load(MOVED + num_moved + row, mask=row < num_moved, other=0)
    is_moved = ((row < num_moved) & (sources != targets))[:, None] & (at < end)[None, :]
    moved = tl.load(buffer + sources[:, None] * apart + at[None, :], mask=is_moved, other=0.0)
    tl.debug_barrier()
    tl.store(buffer + targets[:, None] * apart + at[None, :], moved, mask=is_moved)


class RowMover:
    """The addresses of all layers' buffers (rows, positions, 2, heads, width), valid until they move."""

    def __init__(self, buffers: Sequence[torch.Tensor]) -> None:
        first = buffers[0]
        self._base, self._num_layers = first, len(buffers)
        offsets = [(buffer.data_ptr() - first.data_ptr()) // first.element_size() for buffer in buffers]
        self._table = send(offsets, first.device)

    def move(self, sources: Sequence[int], targets: Sequence[int], first: int, stop: int) -> None:
        """Let rows `targets`, at most `MOST_ROWS`, become what `sources` are from position `first` to `stop`."""
        self._launch(send([*sources, *targets], self._base.device), len(targets), first, stop, has_targets=True)

    def follow(self, sources: torch.Tensor, stop: int) -> None:
        """Let all rows, at most `MOST_ROWS`, become what `sources` (rows,) on the device are up to position `stop`."""
        self._launch(sources, len(sources), 0, stop, has_targets=False)

    def _launch(self, moved: torch.Tensor, count: int, first: int, stop: int, *, has_targets: bool) -> None:
        position, rows = self._base.stride(1), round_up(count)
        tile = NUMBERS // rows
        launch(
            _copy_rows,
            (self._num_layers, count_parts((stop - first) * position, tile)),
            self._base,
            self._table,
            moved,
            self._base.stride(0),
            first * position,
            stop * position,
            count,
            ROWS=rows,
            TILE=tile,
            HAS_TARGETS=has_targets,
            num_warps=4,
        )
