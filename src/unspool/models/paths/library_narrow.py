"""Copies of a decoder's float32 matrices in half of the bytes: bfloat16 or float16, if every number is one.

Most checkpoints are stored in one of them and read into float32. What memory gives in a second then bounds a step, and
a product that reads the copy takes half of the time. It is as exact: products of the numbers are, and sums are float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, Final

import torch

from unspool.kernels.cpu import BLOCK, Library, find_library
from unspool.kernels.cpu.pages import Arena, count_arena_bytes
from unspool.kernels.cpu.structures import NARROW, PANEL, FloatKind
from unspool.models.weights import Linear

_FIRST: Final = 256  # numbers that show most matrices which are not exact
_find_version = attrgetter("_version")
Product = tuple[Any, int]
"""A matrix that is multiplied by, and of how many parts it is: those begin at tiles of their own."""


class NarrowCopies:
    """The copies, and what is watched so that none outlives a change of its matrix."""

    def __init__(self, products: Sequence[Product]) -> None:
        self._copies: dict[int, torch.Tensor] = {}  # by the address of the matrix
        self._watched: list[torch.Tensor] = []
        library = find_library()
        found = [] if library is None else _find_candidates(products)
        arena = Arena(count_arena_bytes([2 * _count_numbers(weight) for weight, _ in found]))
        for weight, dtypes in found:
            assert library is not None
            copy = _copy(library, weight, dtypes, arena)
            if copy is not None:
                self._copies[weight.data_ptr()] = copy
                self._watched.append(weight)
        self._kinds = {self._find_kind(linear) for linear, _ in products}
        self._versions = self._find_versions()

    @property
    def kind(self) -> FloatKind | None:
        """What all products read, if every one has its copy: float16 if one of them does."""
        if None in self._kinds or not self._kinds:
            return None
        return "float16" if "float16" in self._kinds else "bfloat16"

    def _find_kind(self, linear: Any) -> FloatKind | None:
        copy = self.find(linear.weight) if isinstance(linear, Linear) else None
        return None if copy is None else NARROW[copy.dtype]

    def find(self, weight: torch.Tensor) -> torch.Tensor | None:
        """The copy of a matrix, if there is one."""
        return self._copies.get(weight.data_ptr())

    def is_current(self) -> bool:
        """Whether no matrix was written to since."""
        return self._find_versions() == self._versions

    def _find_versions(self) -> list[int]:
        return list(map(_find_version, self._watched))


def _find_candidates(products: Sequence[Product]) -> list[tuple[torch.Tensor, list[torch.dtype]]]:
    """The matrices that may have a copy, each once, and of which dtypes."""
    found: dict[int, tuple[torch.Tensor, list[torch.dtype]]] = {}
    for linear, parts in products:
        if isinstance(linear, Linear) and (dtypes := _list_dtypes(linear.weight, parts)):
            found[linear.weight.data_ptr()] = linear.weight, dtypes
    return list(found.values())


def _copy(library: Library, weight: torch.Tensor, dtypes: Sequence[torch.dtype], arena: Arena) -> torch.Tensor | None:
    """The copy of a matrix in the first of the dtypes that holds all of its numbers."""
    for dtype in dtypes:
        copy = arena.take(torch.Size([_count_numbers(weight)]), dtype)
        if library.narrow_rows(weight.detach(), copy):
            return copy
        arena.give_back(copy)
    return None


def _count_numbers(weight: torch.Tensor) -> int:
    """The numbers of a copy: whole panels of rows."""
    return -(-weight.shape[0] // PANEL) * PANEL * weight.shape[1]


def _list_dtypes(weight: torch.Tensor, parts: int) -> list[torch.dtype]:
    """The dtypes that hold the first numbers of a contiguous float32 matrix; none if it does not fit tiles, or changes
    would not be noticed."""
    if weight.dtype != torch.float32 or not weight.is_contiguous() or weight.is_inference():
        return []
    if weight.shape[1] % BLOCK or (parts > 1 and weight.shape[0] % (PANEL * parts)):
        return []
    first = weight.detach().view(-1)[:_FIRST]
    return [dtype for dtype in NARROW if torch.equal(first.to(dtype).float(), first)]
