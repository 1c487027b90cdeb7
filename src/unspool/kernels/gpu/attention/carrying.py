"""Offloaded keys, copied to the GPU while the layers before theirs compute: part of a step's graph.

A separate stream copies the keys of layer `n + 2` as soon as layer `n`, whose memory it reuses, has been read. Sizes
and addresses are read on the device. The reference is a step that reads keys over the link.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
import triton
import triton.language as tl

from unspool.kernels.gpu.launching import launch
from unspool.kernels.sending import send

WORD_BYTES: Final = 4
UNIT: Final = 4  # words: addresses and sizes are multiples of this
WORDS: Final = 4096  # that a program copies at once: what 128 threads can have in flight
WORKERS: Final = 16  # programs per tensor: enough to keep the link busy, on few processors
_ENTRIES: Final = 4  # per tensor


@triton.jit(do_not_specialize=["nth", "window", "num_chunks"])
def _carry(
    BASE, PIECES, COUNTS, nth, window, num_chunks,
    CHUNKS: tl.constexpr, POSITIONS: tl.constexpr, WORDS: tl.constexpr, UNIT: tl.constexpr, ENTRY: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    worker, num_workers = tl.program_id(0), tl.num_programs(0)
    # For each tensor: its address, the address to copy to, the stride of its chunks, and the size of a block of them.
    entry = PIECES + (nth * tl.num_programs(1) + tl.program_id(1)) * ENTRY
    home = BASE + tl.load(entry) * UNIT
    landing = BASE + tl.load(entry + 1) * UNIT
    apart, each = tl.load(entry + 2) * UNIT, tl.load(entry + 3) * UNIT
    word = tl.arange(0, WORDS)
    for chunk in range(num_chunks):
        count = tl.maximum(tl.load(COUNTS + chunk // CHUNKS), 0).to(tl.int64)
        begin = 0 * count
        if HAS_WINDOW:
            begin = tl.maximum(count + 1 - window, 0) * each
        end = count // POSITIONS * each
        for start in tl.range(begin + worker * WORDS, end, num_workers * WORDS):
            at = start + word
            held = tl.load(home + chunk * apart + at, mask=at < end, other=0, eviction_policy="evict_first")
            tl.store(landing + chunk * apart + at, held, mask=at < end)


class Carrier:
    """Copies offloaded layers, each before it is read, into two buffers that alternate.

    A step calls `begin` before its first layer, `hold_for` before a layer's keys are read and `go_on` after it.
    """

    def __init__(
        self,
        away: Sequence[int],  # layers
        rows: int,
        device: torch.device,
        *,
        num_tensors: int = 1,  # per layer
        chunks: int = 1,  # per row of each tensor
        positions: int = 1,  # per block; only whole blocks are copied
        windows: Mapping[int, int] | None = None,  # of the sliding layers, in positions
    ) -> None:
        self._away, self._windows = tuple(away), windows or {}
        self._num_tensors, self._chunks, self._positions = num_tensors, chunks, positions
        self._num_chunks = rows * chunks
        self._table = torch.zeros(len(away) * num_tensors * _ENTRIES, dtype=torch.int64, device=device)
        self._stream: Any = torch.cuda.Stream(device, priority=-1)  # its few programs go before those that fill the GPU
        self._marks: list[Any] = []

    def set_layers(
        self,
        base: torch.Tensor,  # addresses are offsets from it
        homes: Sequence[Sequence[torch.Tensor]],
        pieces: Sequence[Sequence[torch.Tensor]],
        num_positions: int,  # capacity of a chunk
    ) -> None:
        """From now on, copy the layers' tensors (rows, …) from `homes` to `pieces`."""
        size, entries = UNIT * WORD_BYTES, []
        num_blocks = max(num_positions // self._positions, 1)
        for nth, home in enumerate(homes[: len(self._away)]):
            for tensor, piece in zip(home, pieces[nth % 2], strict=True):
                apart = tensor.nbytes // (tensor.shape[0] * self._chunks)
                entries += [(each.data_ptr() - base.data_ptr()) // size for each in (tensor, piece)]
                entries += [apart // size, apart // num_blocks // size]
        self._table.copy_(send(entries, self._table.device))

    def begin(self, base: torch.Tensor, counts: torch.Tensor) -> None:
        """Start copying the first two layers; `counts` are the positions that each row holds."""
        self._marks = []
        self._stream.wait_stream(torch.cuda.current_stream())
        for _ in range(2):
            self._carry_next(base, counts)

    def hold_for(self, layer: int) -> None:
        """Make everything launched from here on wait until a layer has been copied."""
        torch.cuda.current_stream().wait_event(self._marks[self._away.index(layer)])

    def go_on(self, base: torch.Tensor, counts: torch.Tensor) -> None:
        """Start copying the next layer: everything launched so far has read the layer that it overwrites."""
        self._stream.wait_stream(torch.cuda.current_stream())
        self._carry_next(base, counts)

    def _carry_next(self, base: torch.Tensor, counts: torch.Tensor) -> None:
        nth = len(self._marks)
        if nth == len(self._away):
            return
        window = self._windows.get(self._away[nth])
        with torch.cuda.stream(self._stream):
            launch(
                _carry,
                (WORKERS, self._num_tensors),
                base.view(torch.int32),
                self._table,
                counts,
                nth,
                window or 0,
                self._num_chunks,
                CHUNKS=self._chunks,
                POSITIONS=self._positions,
                WORDS=WORDS,
                UNIT=UNIT,
                ENTRY=_ENTRIES,
                HAS_WINDOW=window is not None,
                num_warps=4,
            )
            self._marks.append(self._stream.record_event())
