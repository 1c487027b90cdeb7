"""A sketch of a decoder's head: by it the CPU library finds the likeliest tokens without all logits (csrc/sketch.h)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Final

import torch

from unspool.kernels.cpu import BLOCK, Library
from unspool.kernels.cpu.pages import Arena
from unspool.kernels.cpu.structures import CSketch, describe_matrix, point
from unspool.kernels.cpu.tiles import TILE, count_tile_bytes
from unspool.models.weights import AnyLinear, Linear

_FEWEST: Final = 4096  # tokens from which on a sketch is faster than the head itself
_MOST_CLOSE: Final = 1 / 8  # of all tokens that it may leave, or it saves too little
_FIRST: Final = 64  # rows that are chosen before that is judged
_MEASURED: Final = 2048  # rows that show how large columns are
_LARGEST: Final = 60  # powers of two that columns are divided by


class HeadSketch:
    """A head's rows as int8, each column divided by a power of two near its own size: rows of even columns lose least.

    It is watched, like other copies of weights, so that it does not outlive a change of them.
    """

    def __init__(self, head: Linear, library: Library) -> None:
        self._head = head
        weight, bias = head.weight.detach(), head.bias
        rows, columns = weight.shape
        norms = torch.linalg.vector_norm(weight[:: -(-rows // _MEASURED)], dim=0) / _MEASURED**0.5
        exponents = torch.log2(norms).round().clamp(-_LARGEST, _LARGEST)
        self._powers = torch.where(norms > 0, torch.exp2(exponents), torch.ones(()))
        num_bytes = count_tile_bytes("int8", rows, columns)
        assert num_bytes is not None, "can_sketch() says so"
        self._tiles = Arena(num_bytes).take(torch.Size([num_bytes]), torch.uint8)
        self._reaches = torch.empty(2, rows)
        self.is_sound = _make(library, weight, 1 / self._powers, self._tiles, self._reaches)
        margin = 0.0
        if bias is not None:
            finite = bias.detach()[bias.detach() > -torch.inf]  # of others the logit is -inf by either product
            margin = float(finite.abs().amax()) * 2.0**-21 if finite.numel() else 0.0
            self.is_sound &= margin < torch.inf
        matrix = describe_matrix(self._tiles, bias, "int8", rows, columns)
        self.struct = CSketch(matrix, point(self._powers), point(self._reaches), margin, 0)
        self._state = self._find_state()
        self._num_close = self._num_chosen = 0

    def is_current(self) -> bool:
        """Whether the head has not moved or changed since."""
        return self._find_state() == self._state

    def note_close(self, num_close: int, num_rows: int) -> bool:
        """Count the tokens that were left in steps of so many rows; whether there are so few that it is worth it."""
        self._num_close += num_close
        self._num_chosen += num_rows
        all_tokens = self._num_chosen * self._head.weight.shape[0]
        return self._num_chosen < _FIRST or self._num_close <= _MOST_CLOSE * all_tokens

    def _find_state(self) -> list[tuple[int, int]]:
        weight, bias = self._head.weight, self._head.bias
        return [(part.data_ptr(), part._version) for part in (weight, bias) if part is not None]


def can_sketch(head: AnyLinear) -> bool:
    """Whether a head has many plain float32 rows, and changes of them would be noticed."""
    if not isinstance(head, Linear):
        return False
    weight, bias = head.weight, head.bias
    is_plain = weight.dtype == torch.float32 and weight.is_contiguous() and not weight.is_inference()
    fits = weight.shape[0] >= _FEWEST and weight.shape[1] % BLOCK == 0
    return is_plain and fits and (bias is None or (bias.dtype == torch.float32 and not bias.is_inference()))


def _make(
    library: Library, weight: torch.Tensor, inverses: torch.Tensor, tiles: torch.Tensor, reaches: torch.Tensor
) -> bool:
    """Write the tiles and reaches, a part of the rows in each thread; whether every number is finite."""
    rows, threads = weight.shape[0], library.threads
    width = -(-rows // (TILE * threads)) * TILE
    of_row = tiles.numel() // (-(-rows // TILE) * TILE)

    def work(first: int) -> bool:
        last = min(rows, first + width)
        part = tiles[first * of_row : -(-last // TILE) * TILE * of_row]
        return library.sketch_rows(weight[first:last], inverses, part, reaches[:, first:last])

    with ThreadPoolExecutor(threads) as pool:
        return all(pool.map(work, range(0, rows, width)))
