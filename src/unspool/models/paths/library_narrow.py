"""Copies of a decoder's float32 matrices in half of the bytes: bfloat16, if every number is one.

Most checkpoints are stored in bfloat16 and read into float32. What memory gives in a second then bounds a step, and a
product that reads the copy takes half of the time. It is as exact: products of the numbers are, and sums are float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import Final

import torch

from unspool.kernels.cpu import BLOCK, find_library
from unspool.kernels.cpu.pages import Arena, count_arena_bytes
from unspool.kernels.cpu.structures import PANEL
from unspool.models.decoder.layers import DecoderWeights
from unspool.models.decoder.spec import DecoderSpec
from unspool.models.weights import Linear

_FIRST: Final = 256  # numbers that show most matrices which are not exact
_find_version = attrgetter("_version")


class NarrowCopies:
    """The copies, and what is watched so that none outlives a change of its matrix."""

    def __init__(self, spec: DecoderSpec, weights: DecoderWeights) -> None:
        self._copies: dict[int, torch.Tensor] = {}  # by the address of the matrix
        self._watched: list[torch.Tensor] = []
        library = find_library()
        products = list(_list_products(spec, weights))
        found = [
            linear.weight
            for linear, parts in products
            if isinstance(linear, Linear) and _may_be_exact(linear.weight, parts)
        ]
        if library is None:
            found = []
        arena = Arena(count_arena_bytes([2 * _count_numbers(weight) for weight in found]))
        for weight in found:
            if weight.data_ptr() not in self._copies:
                copy = arena.take(torch.Size([_count_numbers(weight)]), torch.bfloat16)
                assert library is not None
                if library.narrow_rows(weight.detach(), copy):
                    self._copies[weight.data_ptr()] = copy
                    self._watched.append(weight)
                else:
                    arena.give_back(copy)
        self.is_whole = all(
            isinstance(linear, Linear) and self.find(linear.weight) is not None for linear, _ in products
        )
        """Whether every product has its copy."""
        self._versions = self._find_versions()

    def find(self, weight: torch.Tensor) -> torch.Tensor | None:
        """The copy of a matrix, if there is one."""
        return self._copies.get(weight.data_ptr())

    def is_current(self) -> bool:
        """Whether no matrix was written to since."""
        return self._find_versions() == self._versions

    def _find_versions(self) -> list[int]:
        return list(map(_find_version, self._watched))


def _list_products(spec: DecoderSpec, weights: DecoderWeights) -> Iterator[tuple[object, int]]:
    """Matrices that are multiplied by, and of how many parts each is: those begin at tiles of their own."""
    gates = 2 if spec.is_gated else 1
    for layer in weights.layers:
        experts = spec.mixture.num_experts if spec.mixture is not None and layer.mixture is not None else 1
        yield from ((layer.qkv, 1), (layer.out, 1), (layer.up, gates * experts), (layer.down, experts))
    yield weights.head, 1


def _count_numbers(weight: torch.Tensor) -> int:
    """The numbers of a copy: whole panels of rows."""
    return -(-weight.shape[0] // PANEL) * PANEL * weight.shape[1]


def _may_be_exact(weight: torch.Tensor, parts: int) -> bool:
    """Whether a contiguous float32 matrix fits tiles, its first numbers are bfloat16, and changes would be noticed."""
    if weight.dtype != torch.float32 or not weight.is_contiguous() or weight.is_inference():
        return False
    if weight.shape[1] % BLOCK or (parts > 1 and weight.shape[0] % (PANEL * parts)):
        return False
    first = weight.detach().view(-1)[:_FIRST]
    return torch.equal(first.bfloat16().float(), first)
