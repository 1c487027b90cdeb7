"""Copying numbers from the host to a device without waiting."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def send(numbers: Sequence[float], device: torch.device, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """The numbers as a tensor on a device; the host does not wait for the GPU's pending work.

    A plain copy to a GPU waits for all work launched before it. A copy from pinned memory is queued, and torch does
    not reuse the memory until it has been read.
    """
    if device.type != "cuda":
        return torch.tensor(list(numbers), dtype=dtype, device=device)
    return torch.tensor(list(numbers), dtype=dtype, pin_memory=True).to(device, non_blocking=True)
