"""Bytes on their way from mapped files to a GPU: through page-locked buffers that threads fill as others are sent."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

import numpy as np
import torch

_BUFFERS: Final = 8
_BUFFER_BYTES: Final = 4 << 20
# Torch's own copy meets after every part, which takes long while other processes compile kernels on all cores.
_THREADS: Final = 4


class Staging:
    """Copies of plain numbers to one GPU, and the sums by which NaN among them is found without reading them again."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        held = torch.empty(_BUFFERS, _BUFFER_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
        self._buffers = list(held)
        self._arrays = [buffer.numpy() for buffer in self._buffers]
        self._sent = [torch.cuda.Event() for _ in self._buffers]
        self._turn = 0
        self._threads = ThreadPoolExecutor(_THREADS, "unspool weights")
        self._names: list[str] = []
        self._sums: list[torch.Tensor] = []

    def send(self, name: str, raw: torch.Tensor, out: torch.Tensor) -> None:
        """Copy bytes into a contiguous tensor of the device, in its current stream."""
        source, target = raw.numpy(), out.view(-1).view(torch.uint8)
        filling: deque[tuple[Future[Any], int, torch.Tensor]] = deque()
        with torch.cuda.device(self.device):
            for first in range(0, len(source), _BUFFER_BYTES):
                if len(filling) == _BUFFERS:
                    self._pass_on(*filling.popleft())
                turn, part = self._turn, source[first : first + _BUFFER_BYTES]
                self._turn = (turn + 1) % _BUFFERS
                self._sent[turn].synchronize()
                filled = self._threads.submit(np.copyto, self._arrays[turn][: len(part)], part)
                filling.append((filled, turn, target[first : first + len(part)]))
            while filling:
                self._pass_on(*filling.popleft())
            if out.is_floating_point():
                self._names.append(name)
                self._sums.append(out.sum(dtype=torch.float32))

    def _pass_on(self, filled: Future[Any], turn: int, to: torch.Tensor) -> None:
        """Send a buffer once it is filled."""
        filled.result()
        to.copy_(self._buffers[turn][: len(to)], non_blocking=True)
        self._sent[turn].record()

    def find_suspects(self) -> list[str]:
        """The tensors sent so far in which there may be NaN: their sums are no finite numbers."""
        if not self._sums:
            return []
        are_finite = torch.stack(self._sums).isfinite().tolist()
        suspects = [name for name, is_finite in zip(self._names, are_finite, strict=True) if not is_finite]
        self._names, self._sums = [], []
        return suspects

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown()
