"""A sketch of a decoder's head: by it the CPU library finds the likeliest tokens without all logits (csrc/sketch.h)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

from unspool.kernels.cpu import BLOCK, Library
from unspool.kernels.cpu.pages import Arena
from unspool.kernels.cpu.structures import CSketch, describe_matrix, point
from unspool.kernels.cpu.tiles import TILE, count_tile_bytes
from unspool.models.paths.sketching import SketchedHead, can_sketch, find_margin, find_powers
from unspool.models.weights import AnyLinear, Linear


class HeadSketch(SketchedHead):
    """A head's rows as int8, each column divided by a power of two near its own size: rows of even columns lose least.

    It is watched, like other copies of weights, so that it does not outlive a change of them.
    """

    def __init__(self, head: Linear, library: Library) -> None:
        super().__init__(head)
        weight, bias = head.weight.detach(), head.bias
        rows, columns = weight.shape
        self._powers = find_powers(weight)
        num_bytes = count_tile_bytes("int8", rows, columns)
        assert num_bytes is not None, "can_sketch_in_library() says so"
        self._tiles = Arena(num_bytes).take(torch.Size([num_bytes]), torch.uint8)
        self._reaches = torch.empty(2, rows)
        self.is_sound = _make(library, weight, 1 / self._powers, self._tiles, self._reaches)
        margin = find_margin(bias)
        self.is_sound &= margin < torch.inf
        matrix = describe_matrix(self._tiles, bias, "int8", rows, columns)
        self.struct = CSketch(matrix, point(self._powers), point(self._reaches), margin, 0)


def can_sketch_in_library(head: AnyLinear) -> bool:
    """Whether a head has many plain float32 rows, and changes of them would be noticed."""
    if not can_sketch(head, (torch.float32,)):
        return False
    assert isinstance(head, Linear)
    return head.weight.shape[1] % BLOCK == 0 and (head.bias is None or head.bias.dtype == torch.float32)


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
