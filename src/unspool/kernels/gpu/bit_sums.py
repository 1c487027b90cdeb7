"""Sums over the bits of many tensors in one launch, with one wait for it. The reference is `kernels.bit_sums`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
import triton
import triton.language as tl

_TILE: Final = 4096  # numbers at once
_TILES: Final = 8  # of a program


@triton.jit
def _sum_pieces(AT, COUNTS, TENSORS, PIECES, SUMS, SIZE: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr):
    program = tl.program_id(0)
    tensor = tl.load(TENSORS + program)
    count = tl.load(COUNTS + tensor)
    address = tl.load(AT + tensor)
    first = tl.load(PIECES + program).to(tl.int64) * (TILE * TILES)
    total = tl.zeros((TILE,), tl.int64)
    for tile in range(TILES):
        place = first + tile * TILE + tl.arange(0, TILE)
        if SIZE == 4:
            bits = tl.load(address.to(tl.pointer_type(tl.int32)) + place, mask=place < count, other=0)
            x = bits.to(tl.uint32, bitcast=True)
        elif SIZE == 2:
            bits = tl.load(address.to(tl.pointer_type(tl.int16)) + place, mask=place < count, other=0)
            x = bits.to(tl.uint16, bitcast=True).to(tl.uint32)
        else:
            x = tl.load(address.to(tl.pointer_type(tl.uint8)) + place, mask=place < count, other=0).to(tl.uint32)
        x = x ^ (place.to(tl.uint32) * 0x9E3779B9).to(tl.uint32)
        x = ((x ^ (x >> 16)) * 0x85EBCA6B).to(tl.uint32)
        x = ((x ^ (x >> 13)) * 0xC2B2AE35).to(tl.uint32)
        x = x ^ (x >> 16)
        total += tl.where(place < count, x.to(tl.int64), 0)
    tl.atomic_add(SUMS + tensor, tl.sum(total, 0))


def sum_on_gpu(flat: Sequence[torch.Tensor]) -> list[int]:
    """The sums of rows of uint8, int16 or int32, all of one kind and on one device."""
    device, size = flat[0].device, flat[0].element_size()
    counts = [one.numel() for one in flat]
    pieces = [-(-count // (_TILE * _TILES)) for count in counts]
    number = torch.tensor(pieces)
    tensors = torch.repeat_interleave(torch.arange(len(flat)), number)
    begins = torch.repeat_interleave(number.cumsum(0) - number, number)
    places = torch.arange(len(tensors)) - begins
    table = torch.stack([torch.tensor([one.data_ptr() for one in flat]), torch.tensor(counts)]).to(device)
    rows = torch.stack([tensors, places]).to(device, torch.int32)
    sums = torch.zeros(len(flat), dtype=torch.int64, device=device)
    with torch.cuda.device(device):
        _sum_pieces[(len(tensors),)](table[0], table[1], rows[0], rows[1], sums, SIZE=size, TILE=_TILE, TILES=_TILES)
    return [int(one) for one in sums.tolist()]
