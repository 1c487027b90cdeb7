"""Where a cache's keys lie in memory: what passes that find them by address (the CPU library, captured and compiled
steps) must know."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from unspool.kernels.packing import Scheme


@dataclass(frozen=True, slots=True, eq=False)
class PackedPlaces:
    """What of a cache is packed: the first `num_packed` positions of each row, in blocks."""

    layers: list[tuple[torch.Tensor, ...]]  # codes, scales and zero points of keys, then of values, one tuple per layer
    schemes: tuple[Scheme, Scheme]  # of keys and of values
    num_places: int  # positions that a row has room for
    num_packed: list[int]  # positions before the first that is not packed, one per row
    sliding: list[bool] | None = None  # layers that hold a window alone: their places are counted from a row's base
    bases: list[int] | None = None  # the position that place 0 of those stands for, one per row
    block_table: torch.Tensor | None = None  # (rows or more, blocks) int32: rows of `layers` are blocks


@dataclass(frozen=True, slots=True, eq=False)
class Landing:
    """Layers whose keys live beside the device, and where on it they are brought before they are read: in turn."""

    away: tuple[int, ...]  # layers
    homes: list[tuple[torch.Tensor, ...]]  # what is brought of each of them
    pieces: tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]  # device memory for two layers


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Places:
    """The buffers (rows, capacity, 2, heads, width) of all layers; another object once anything has moved.

    Rows that share a prompt's keys have those in `shared`, and find their own position `j` in the row that
    `ancestry[row, j]` names. If the first positions are `packed`, the buffers hold those that follow. With a
    `block_table` the buffers are (blocks, block size, 2, heads, width), and position `j` of a row lies at place
    `j % block size` of block `block_table[row, j // block size]`; 0: the row has no block there. Its entries may
    change from step to step.
    """

    buffers: list[torch.Tensor]
    branches: int = 0  # rows per prompt; 0 if nothing is shared
    shared: list[torch.Tensor] | None = None
    prompt_lengths: list[int] | None = None  # shared positions, one per row
    ancestry: torch.Tensor | None = None  # (rows, own capacity) int32
    packed: PackedPlaces | None = None
    rooms: list[int] | None = None  # positions of each layer's buffer, where position `j` lies at place `j % room`
    block_table: torch.Tensor | None = None  # (rows or more, blocks) int32
    layer_tables: list[torch.Tensor] | None = None  # the same, one per layer and of one shape, if layers differ in them
    is_pinned: bool = False  # some buffers lie in the host's memory, which the device reads through the link
    landing: Landing | None = None  # where a step may bring those first

    @property
    def is_plain(self) -> bool:
        """Whether the buffers hold every row's keys at the indices of their positions, and nothing else is to know."""
        has_table = self.block_table is not None or self.layer_tables is not None
        return not self.branches and self.packed is None and self.rooms is None and not has_table

    @property
    def block_size(self) -> int:
        """Positions of a block; 0 if rows lie whole."""
        return self.buffers[0].shape[1] if self.block_table is not None and self.buffers else 0
