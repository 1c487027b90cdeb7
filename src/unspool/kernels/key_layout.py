"""How captured passes find the key of a position of a row.

A pass gets the addresses of a cache's memory as one table of numbers, so that one graph serves every cache. Addresses
are offsets from a tensor that the pass owns: those of keys in units of several numbers, those of indices in int32.

- plain: the layers' buffers, and a row's capacity in positions. Key `j` of row `r` is at index `j` of row `r`. If
  layers are offloaded, these are the buffers that they are copied to; the addresses of their homes follow the capacity.
- rings: the same, followed by each layer's capacity. Key `j` of a layer of capacity `n` is at index `j % n`: a
  sliding layer has a capacity of its window.
- branches: the plain entries; the same for the prompts' buffers; address and width of the ancestry; the number `s` of
  keys that each row shares. Key `j` is at index `j` of the row's prompt if `j < s`, else at index `j - s` of row
  `ancestry[r, j - s]`: a block of one position.
- blocks: the layers' blocks, and the positions per block; address and width of the block table. Key `j` is at index
  `j % size` of block `table[r, j // size]`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class KeyLayout:
    """The layout that a pass reads and its kernels are compiled for."""

    branches: int = 0  # rows per prompt that share its keys; 0 if none do
    block_size: int = 0  # positions per block; 0 if rows are contiguous
    is_ring: bool = False  # layers have different capacities and wrap around at their end
    is_away: bool = False  # of a layer: its keys are offloaded and were copied here; new ones are written to their home

    def count_entries(self, num_layers: int, rows: int) -> int:
        """How many numbers the table has."""
        own = num_layers + 1
        if self.branches:
            return 2 * own + 2 + rows
        if self.is_ring:
            return own + num_layers
        return own + 2 if self.block_size else own


PLAIN: Final = KeyLayout()
