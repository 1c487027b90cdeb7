"""Memory beside a GPU that the GPU reads and writes through the link, as if it were its own."""

from __future__ import annotations

import math
from typing import Any

import torch


class _Pinned:
    """Pinned memory under the name by which other libraries offer a GPU's: torch makes a tensor of the GPU of it."""

    def __init__(self, held: torch.Tensor) -> None:
        self._held = held  # lives as long as the tensor that is made of this
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (held.numel(),),
            "typestr": "|u1",
            "data": (held.data_ptr(), False),
            "version": 3,
        }


def take_linked(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros in the host's memory, as a tensor of the GPU `device`: every operator works on it, at the link's speed."""
    nbytes = math.prod(shape) * dtype.itemsize
    if not nbytes:
        return torch.zeros(shape, dtype=dtype, device=device)
    held = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True)
    return torch.as_tensor(_Pinned(held), device=device).view(dtype).view(shape)
