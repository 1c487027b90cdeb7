"""Copies of a decoder's float32 matrices in half of the bytes: bfloat16, if every number is one.

Most checkpoints are stored in bfloat16 and read into float32. What memory gives in a second then bounds a step, and a
product that reads the copy gives the same bits in half of the time.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import Final

import torch

from unspool.kernels.cpu.pages import Arena, count_arena_bytes
from unspool.models.decoder.layers import DecoderWeights
from unspool.models.weights import Linear

_CHUNK: Final = 1 << 20  # numbers that are compared at once, after
_FIRST: Final = 256  # that tell most matrices which are not exact
_find_version = attrgetter("_version")


class NarrowCopies:
    """The copies, and what is watched so that none outlives a change of its matrix."""

    def __init__(self, weights: DecoderWeights) -> None:
        self._copies: dict[int, torch.Tensor] = {}  # by the address of the matrix
        self._watched: list[torch.Tensor] = []
        found = [linear.weight for linear in _list_products(weights) if isinstance(linear, Linear)]
        arena = Arena(count_arena_bytes([weight.nbytes // 2 for weight in found if _may_be_exact(weight)]))
        for weight in found:
            if weight.data_ptr() not in self._copies and _may_be_exact(weight):
                copy = arena.take(weight.shape, torch.bfloat16)
                if narrow(weight, copy):
                    self._copies[weight.data_ptr()] = copy
                    self._watched.append(weight)
                else:
                    arena.give_back(copy)
        self._versions = self._find_versions()

    def find(self, weight: torch.Tensor) -> torch.Tensor | None:
        """The copy of a matrix, if there is one."""
        return self._copies.get(weight.data_ptr())

    def is_current(self) -> bool:
        """Whether no matrix was written to since."""
        return self._find_versions() == self._versions

    def _find_versions(self) -> list[int]:
        return list(map(_find_version, self._watched))


def _list_products(weights: DecoderWeights) -> Iterable[object]:
    for layer in weights.layers:
        yield from (layer.qkv, layer.out, layer.up, layer.down)
    yield weights.head


def _may_be_exact(weight: torch.Tensor) -> bool:
    """Whether the first numbers of a contiguous float32 matrix are bfloat16, and changes of it would be noticed."""
    if weight.dtype != torch.float32 or not weight.is_contiguous() or weight.is_inference():
        return False
    first = weight.detach().view(-1)[:_FIRST]
    return torch.equal(first.bfloat16().float(), first)


def narrow(weight: torch.Tensor, copy: torch.Tensor) -> bool:
    """Copy a matrix into one of bfloat16; whether no number was rounded."""
    numbers, halves = weight.detach().view(-1), copy.view(-1)
    for begin in range(0, len(numbers), _CHUNK):
        part, made = numbers[begin : begin + _CHUNK], halves[begin : begin + _CHUNK]
        made.copy_(part)
        if not torch.equal(made.float(), part):
            return False
    return True
