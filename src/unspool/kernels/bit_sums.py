"""Sums over the bits of tensors, by which a later look finds whether a number was written since.

Each number's bits are mixed with its place, so that signs, NaN and numbers that change places show.
`cpu/csrc/bit_sums.h` is the same in C, `gpu.bit_sums` on a GPU; what is here is their reference, and serves where
neither runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from unspool.kernels.cpu import find_library
from unspool.kernels.presence import runs_kernels

_STEP: Final = 0x9E3779B9
_MIX_1: Final = 0x85EBCA6B
_MIX_2: Final = 0xC2B2AE35
_MASK: Final = 0xFFFFFFFF
_PIECE: Final = 1 << 20  # numbers
_VIEWS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def sum_bits(tensors: Sequence[torch.Tensor]) -> list[int]:
    """The sum of each tensor, all of which are on one device; of one that has gaps in memory, by its numbers."""
    made = [0] * len(tensors)
    groups: dict[int, list[int]] = {}
    whole = list(map(_lay_whole, tensors))
    for place, tensor in enumerate(whole):
        if tensor.numel():
            groups.setdefault(tensor.element_size(), []).append(place)
    for places in groups.values():
        for place, total in zip(places, _sum_group([whole[place] for place in places]), strict=True):
            made[place] = total
    return made


def _lay_whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's memory as one row of numbers of at most four bytes: shared, unless it lies with gaps."""
    held = tensor.detach()
    if not held.is_contiguous():
        order = sorted(range(held.dim()), key=held.stride, reverse=True)
        held = held.permute(order)
    flat = held.reshape(-1)
    return flat.view(torch.int32) if flat.element_size() > 4 else flat.view(_VIEWS[flat.element_size()])


def _sum_group(flat: Sequence[torch.Tensor]) -> list[int]:
    device = flat[0].device
    if device.type == "cpu" and (library := find_library()) is not None and library.can_sum:
        return library.sum_bits(flat)
    if runs_kernels(device):
        from unspool.kernels.gpu.bit_sums import sum_on_gpu  # Triton is imported only if a GPU is used

        return sum_on_gpu(flat)
    return sum_by_operators(flat)


def sum_by_operators(flat: Sequence[torch.Tensor]) -> list[int]:
    """The reference: sums of rows of uint8, int16 or int32."""
    totals = [torch.zeros((), dtype=torch.int64, device=one.device) for one in flat]
    for total, numbers in zip(totals, flat, strict=True):
        for first in range(0, numbers.numel(), _PIECE):
            some = numbers[first : first + _PIECE].long() & ((1 << 8 * numbers.element_size()) - 1)
            places = torch.arange(first, first + some.numel(), device=numbers.device)
            x = some ^ ((places * _STEP) & _MASK)
            x = ((x ^ (x >> 16)) * _MIX_1) & _MASK
            x = ((x ^ (x >> 13)) * _MIX_2) & _MASK
            total += (x ^ (x >> 16)).sum()
    return [int(total) for total in torch.stack(totals).tolist()]
