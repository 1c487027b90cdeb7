"""Numbers that the host knows, on a device."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def send(numbers: Sequence[float], device: torch.device, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """The numbers as a tensor on a device; the host does not wait for what a GPU has still to do.

    A plain copy to a GPU waits for all work launched before it. From pinned memory it takes its place in the queue,
    and torch gives the memory to nobody else until it has been read.
    """
    if device.type != "cuda":
        return torch.tensor(list(numbers), dtype=dtype, device=device)
    return torch.tensor(list(numbers), dtype=dtype, pin_memory=True).to(device, non_blocking=True)
