"""How captured passes find the key of a position of a row.

A pass is told where a cache's memory lies by one table of numbers, so that one graph serves every cache. Addresses are
counted from a tensor that the pass owns, those of keys in units of some numbers, those of indices in int32.

- plain: the layers' buffers, and the positions that a row has room for. Key `j` of row `r` is at place `j` of row `r`.
  Where layers are away, those buffers are the ones that they were brought into, and behind the room is where they live.
- rings: that, and behind it the positions that each layer has room for. Key `j` of a layer with room for `n` is at
  place `j % n`: a layer that slides has room for its window alone.
- branches: what is plain; the same of the prompts' buffers; where the ancestry lies and its width; the number `s` of
  keys that each row shares. Key `j` is at place `j` of the row's prompt where `j < s`, else at place `j - s` of row
  `ancestry[r, j - s]`: a block of one position.
- blocks: the layers' blocks, and the positions of a block; where the block table lies and its width. Key `j` is at
  place `j % size` of block `table[r, j // size]`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class KeyLayout:
    """Which of the layouts a pass reads, and what its kernels are compiled for."""

    branches: int = 0  # rows a prompt that share its keys; 0 where none do
    block_size: int = 0  # positions of a block; 0 where rows lie whole
    is_ring: bool = False  # layers have room for different numbers of positions, and begin anew where it ends
    is_away: bool = False  # of a layer: its keys were brought here, and new ones are written where they live

    def count_entries(self, num_layers: int, rows: int) -> int:
        """How many numbers the table has."""
        own = num_layers + 1
        if self.branches:
            return 2 * own + 2 + rows
        if self.is_ring:
            return own + num_layers
        return own + 2 if self.block_size else own


PLAIN: Final = KeyLayout()
