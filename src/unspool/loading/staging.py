"""Bytes on their way from mapped files to a GPU: through page-locked buffers, one filled while the other is sent."""

from __future__ import annotations

from typing import Final

import torch

_BUFFER_BYTES: Final = 16 << 20


class Staging:
    """Copies of plain numbers to one GPU, and the sums by which NaN among them is found without reading them again."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffers = [torch.empty(_BUFFER_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._sent = [torch.cuda.Event() for _ in self._buffers]  # type: ignore[no-untyped-call]
        self._turn = 0
        self._names: list[str] = []
        self._sums: list[torch.Tensor] = []

    def send(self, name: str, raw: torch.Tensor, out: torch.Tensor) -> None:
        """Copy bytes into a contiguous tensor of the device, in its current stream."""
        target = out.view(-1).view(torch.uint8)
        with torch.cuda.device(self.device):
            for first in range(0, len(raw), _BUFFER_BYTES):
                part = raw[first : first + _BUFFER_BYTES]
                buffer = self._buffers[self._turn][: len(part)]
                self._sent[self._turn].synchronize()
                buffer.copy_(part)
                target[first : first + len(part)].copy_(buffer, non_blocking=True)
                self._sent[self._turn].record()
                self._turn = 1 - self._turn
            if out.is_floating_point():
                self._names.append(name)
                self._sums.append(out.sum(dtype=torch.float32))

    def find_suspects(self) -> list[str]:
        """The tensors sent so far in which there may be NaN: their sums are no finite numbers."""
        if not self._sums:
            return []
        are_finite = torch.stack(self._sums).isfinite().tolist()
        suspects = [name for name, is_finite in zip(self._names, are_finite, strict=True) if not is_finite]
        self._names, self._sums = [], []
        return suspects
