"""Keys that live beside the GPU, brought over while the layers before theirs compute: a part of a step's own graph.

A stream of its own copies what layer `n + 2` needs as soon as layer `n`, whose memory it takes over, has been read. How
much that is, and where it lies, is read on the device. The reference is a step that reads keys through the link.
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
UNIT: Final = 4  # words: addresses and sizes are told as multiples of so many
WORDS: Final = 4096  # a program copies at once: what 128 threads can have on its way
WORKERS: Final = 16  # programs a tensor: as many as keep the link busy, and few processors
_TOLD: Final = 4  # numbers a tensor


@triton.jit(do_not_specialize=["nth", "window", "num_chunks"])
def _carry(
    BASE, PIECES, COUNTS, nth, window, num_chunks,
    CHUNKS: tl.constexpr, POSITIONS: tl.constexpr, WORDS: tl.constexpr, UNIT: tl.constexpr, TOLD: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    worker, num_workers = tl.program_id(0), tl.num_programs(0)
    # Of each tensor: where it lives, where it goes, how far its chunks lie apart, and what a block of them takes.
    told = PIECES + (nth * tl.num_programs(1) + tl.program_id(1)) * TOLD
    home = BASE + tl.load(told) * UNIT
    landing = BASE + tl.load(told + 1) * UNIT
    apart, each = tl.load(told + 2) * UNIT, tl.load(told + 3) * UNIT
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
    """Brings the layers that are away, each before it is read, into two pieces of memory that take turns.

    A step calls `begin` before its first layer, `hold_for` before a layer's keys are read and `go_on` after it.
    """

    def __init__(
        self,
        away: Sequence[int],  # layers
        rows: int,
        device: torch.device,
        *,
        num_tensors: int = 1,  # a layer's
        chunks: int = 1,  # that a row has of each
        positions: int = 1,  # in a block, of which only whole ones are brought
        windows: Mapping[int, int] | None = None,  # positions that layers look back, where they don't see all
    ) -> None:
        self._away, self._windows = tuple(away), windows or {}
        self._num_tensors, self._chunks, self._positions = num_tensors, chunks, positions
        self._num_chunks = rows * chunks
        self._told = torch.zeros(len(away) * num_tensors * _TOLD, dtype=torch.int64, device=device)
        self._stream: Any = torch.cuda.Stream(device, priority=-1)  # its few programs go before those that fill the GPU
        self._marks: list[Any] = []

    def tell(
        self,
        base: torch.Tensor,  # where addresses are counted from
        homes: Sequence[Sequence[torch.Tensor]],
        pieces: Sequence[Sequence[torch.Tensor]],
        num_positions: int,  # that a chunk has room for
    ) -> None:
        """Bring these layers' tensors (rows, …) to those pieces, from now on."""
        size, told = UNIT * WORD_BYTES, []
        num_blocks = max(num_positions // self._positions, 1)
        for nth, home in enumerate(homes[: len(self._away)]):
            for tensor, piece in zip(home, pieces[nth % 2], strict=True):
                apart = tensor.nbytes // (tensor.shape[0] * self._chunks)
                told += [(each.data_ptr() - base.data_ptr()) // size for each in (tensor, piece)]
                told += [apart // size, apart // num_blocks // size]
        self._told.copy_(send(told, self._told.device))

    def begin(self, base: torch.Tensor, counts: torch.Tensor) -> None:
        """Start with the first two layers; `counts` are the positions that each row holds."""
        self._marks = []
        self._stream.wait_stream(torch.cuda.current_stream())
        for _ in range(2):
            self._carry_next(base, counts)

    def hold_for(self, layer: int) -> None:
        """Let what is launched from here on wait until a layer is there."""
        torch.cuda.current_stream().wait_event(self._marks[self._away.index(layer)])

    def go_on(self, base: torch.Tensor, counts: torch.Tensor) -> None:
        """Start with the next layer: what was launched so far has read the one whose place it takes."""
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
                self._told,
                counts,
                nth,
                window or 0,
                self._num_chunks,
                CHUNKS=self._chunks,
                POSITIONS=self._positions,
                WORDS=WORDS,
                UNIT=UNIT,
                TOLD=_TOLD,
                HAS_WINDOW=window is not None,
                num_warps=4,
            )
            self._marks.append(self._stream.record_event())
