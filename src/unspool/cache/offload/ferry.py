"""Keys on their way between a GPU and the memory beside it: one layer ahead of who reads them.

Two rules keep two streams apart, and nothing else does. A lane carries only after all that the computing stream was
given so far, so what it reads has been written and what it writes over has been read. Who reads what a lane carried
waits for that copy's mark: the computing stream by `hold_for`, the host by `finish`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from unspool.cache.span import Span

Copy = tuple[torch.Tensor, torch.Tensor]
"""Where to, and what."""


class Lane(Protocol):
    """Copies that run beside the computation, one after the other."""

    def carry(self, copies: Iterable[Copy]) -> Any:
        """Copy once everything computed so far is there; return the mark that is reached when that is done."""

    def hold_for(self, mark: Any) -> None:
        """Let what is computed from here on wait for a mark."""

    def finish(self) -> None:
        """Let the host wait for all copies."""


class StreamLane:
    """A CUDA stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device)

    def carry(self, copies: Iterable[Copy]) -> Any:
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for into, source in copies:
                into.copy_(source, non_blocking=True)
                for each in (into, source):
                    if each.is_cuda:  # its memory must not be given away before the lane is done with it
                        each.record_stream(stream)
            return stream.record_event()

    def hold_for(self, mark: Any) -> None:
        torch.cuda.current_stream(self._device).wait_event(mark)

    def finish(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))  # captured steps write home by themselves
        self._stream.synchronize()


@dataclass(frozen=True, slots=True)
class _Fetched:
    """A layer that was fetched and not read yet."""

    layer: int
    place: int  # of the two
    held: int  # positions
    mark: Any


class Ferry:
    """Brings layers' keys to the GPU and new ones back.

    Two pieces of device memory take turns: what layer `n` wrote goes home, then layer `n + 1` is fetched while layer
    `n` computes.
    """

    def __init__(self, device: torch.device, lane: Lane | None = None) -> None:
        self._device = device
        self._lane: Lane = lane if lane is not None else StreamLane(device)
        self._landing: list[torch.Tensor | None] = [None, None]  # (rows, positions, 2, heads, width)
        self._fetched: _Fetched | None = None
        self._turn = 0
        self.is_idle = True  # nothing was given to the lane since it was waited for

    @property
    def is_under_way(self) -> bool:
        """Whether a layer was fetched that was not read yet."""
        return self._fetched is not None

    def bring(self, layer: int, home: torch.Tensor, held: int, rows: int) -> torch.Tensor:
        """A layer's memory on the GPU, with the first `held` positions of its home's first rows in it."""
        fetched = self._fetched
        if fetched is None or fetched.layer != layer or fetched.held < held:
            fetched = self._fetch(layer, home, held, rows)
        self._lane.hold_for(fetched.mark)
        self._fetched, self._turn = None, 1 - fetched.place
        landed = self._landing[fetched.place]
        assert landed is not None
        return landed

    def fetch_ahead(self, layer: int, home: torch.Tensor, held: int, rows: int) -> None:
        """Start bringing a layer that is read next."""
        self._fetched = self._fetch(layer, home, held, rows)

    def show_landings(self, home: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Both pieces of device memory, for a captured step that brings layers by itself; nothing may be on its way."""
        return self._find_landing(0, home), self._find_landing(1, home)

    def _find_landing(self, place: int, home: torch.Tensor) -> torch.Tensor:
        landing = self._landing[place]
        if landing is None or landing.shape != home.shape or landing.dtype != home.dtype:
            # Zeros: what lies past a short row's end is masked, and what memory held before (a NaN, say) can't be.
            landing = self._landing[place] = torch.zeros(home.shape, dtype=home.dtype, device=self._device)
        return landing

    def _fetch(self, layer: int, home: torch.Tensor, held: int, rows: int) -> _Fetched:
        landing = self._find_landing(self._turn, home)
        # Row by row: only what lies in one piece is copied without the host waiting for it.
        self.is_idle = False
        mark = self._lane.carry([(landing[row, :held], home[row, :held]) for row in range(rows)])
        return _Fetched(layer, self._turn, held, mark)

    def send_home(self, home: torch.Tensor, landed: torch.Tensor, span: Span) -> None:
        """Copy what a pass wrote back: each row's own positions."""
        parts = [slice(start, start + count) for start, count in zip(span.starts, span.counts, strict=True)]
        self.is_idle = False
        self._lane.carry([(home[row, part], landed[row, part]) for row, part in enumerate(parts)])

    def finish(self) -> None:
        """Have everything at home, and nothing on its way, before the host reads or moves it."""
        self._lane.finish()
        self._fetched, self.is_idle = None, True

    @property
    def nbytes(self) -> int:
        """Bytes of GPU memory in use."""
        return sum(landing.nbytes for landing in self._landing if landing is not None)
