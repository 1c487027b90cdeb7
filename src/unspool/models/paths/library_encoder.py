"""An encoder's products with short sources in the CPU library, through exact copies of its matrices in half of the
bytes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Final

import torch

from unspool.kernels.cpu import Library, find_library
from unspool.kernels.cpu.structures import NARROW, FloatKind, describe_matrix
from unspool.kernels.torch_threads import one_thread
from unspool.models.paths.library_narrow import NarrowCopies, Product
from unspool.models.weights import AnyLinear, Linear, find_addresses

Multiply = Callable[[AnyLinear, torch.Tensor], torch.Tensor]
"""Multiplies rows (…, in) by a matrix: (…, out)."""

# Rows of a product; for more of them torch's products of plain floats are as fast. Measured on AVX-512 and Arm.
_MOST_ROWS: Final[dict[str, dict[FloatKind, int]]] = {
    "amx": {"bfloat16": sys.maxsize, "float16": 128},
    "avx512": {"bfloat16": 128, "float16": 128},
    "neon_dot": {"bfloat16": sys.maxsize, "float16": sys.maxsize},
    "neon_i8mm": {"bfloat16": sys.maxsize, "float16": sys.maxsize},
}


def beside(multiply: Multiply, num_scores: int) -> AbstractContextManager[None]:
    """A scope for torch's operators between products: beside the library's they leave it the cores, unless attention
    over so many scores wants all of them."""
    return nullcontext() if multiply is multiply_plainly else one_thread(num_scores)


def multiply_plainly(linear: AnyLinear, x: torch.Tensor) -> torch.Tensor:
    """The matrix's own product."""
    return linear(x)


class EncoderProducts:
    """Chooses how an encoder's matrices are multiplied. Copies are made by the first source that gains by them, and
    dropped for good if a matrix moves or is written to."""

    def __init__(self, products: Sequence[Product], *, narrows: bool) -> None:
        self._products, self._may_narrow = products, narrows
        self._copies: NarrowCopies | None = None
        self._weights: list[torch.Tensor] = []
        self._at: list[int] = []

    def choose(self, num_rows: int) -> Multiply:
        """How matrices are multiplied by so many rows."""
        library = find_library()
        if library is None or num_rows > max(_MOST_ROWS.get(library.instructions, {}).values(), default=0):
            return multiply_plainly
        copies = self.find_copies()
        return multiply_plainly if copies is None else partial(_multiply, library, copies)

    def find_copies(self) -> NarrowCopies | None:
        """The copies, on processors where something is multiplied faster by them."""
        library = find_library()
        if not self._may_narrow or library is None or library.instructions not in _MOST_ROWS:
            return None
        if self._copies is None:
            self._weights = [linear.weight for linear, _ in self._products if isinstance(linear, Linear)]
            self._at = find_addresses(self._weights)
            self._copies = NarrowCopies(self._products)
        if not self._copies.is_current() or find_addresses(self._weights) != self._at:
            self._may_narrow, self._copies = False, None
        return self._copies


def _multiply(library: Library, copies: NarrowCopies, linear: AnyLinear, x: torch.Tensor) -> torch.Tensor:
    copy = copies.find(linear.weight) if isinstance(linear, Linear) else None
    rows = x.reshape(-1, x.shape[-1])
    if copy is None or len(rows) > _MOST_ROWS[library.instructions][NARROW[copy.dtype]]:
        return linear(x)
    num_outputs = linear.weight.shape[0]
    matrix = describe_matrix(copy, linear.bias, NARROW[copy.dtype], *linear.weight.shape)
    return library.multiply(matrix, rows).view(*x.shape[:-1], num_outputs)
