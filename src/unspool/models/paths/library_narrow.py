"""Copies of a decoder's float32 matrices in half of the bytes: bfloat16, if every number is one.

Most checkpoints are stored in bfloat16 and read into float32. What memory gives in a second then bounds a step, and a
product that reads the copy gives the same bits in half of the time.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import Final

import torch

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
        for linear in _list_products(weights):
            if isinstance(linear, Linear) and linear.weight.data_ptr() not in self._copies:
                copy = narrow(linear.weight)
                if copy is not None:
                    self._copies[linear.weight.data_ptr()] = copy
                    self._watched.append(linear.weight)
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


def narrow(weight: torch.Tensor) -> torch.Tensor | None:
    """A contiguous float32 matrix in bfloat16; None if a number would be rounded, or changes would not be noticed."""
    if weight.dtype != torch.float32 or not weight.is_contiguous() or weight.is_inference():
        return None
    numbers = weight.detach().view(-1)
    first = numbers[:_FIRST]
    if not torch.equal(first.bfloat16().float(), first):
        return None
    copy = torch.empty(weight.shape, dtype=torch.bfloat16)
    for begin in range(0, len(numbers), _CHUNK):
        part, made = numbers[begin : begin + _CHUNK], copy.view(-1)[begin : begin + _CHUNK]
        made.copy_(part)
        if not torch.equal(made.float(), part):
            return None
    return copy
