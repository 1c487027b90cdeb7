"""A table of blocks on a device: what finds a position's place in the pool, without the host in between."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from unspool.cache.paged.pool import NOBODYS
from unspool.kernels.sending import send

_NARROWEST: Final = 8  # blocks a row
_MOST_SENT: Final = 256  # entries that are sent one by one; more are sent as a whole table
_SMALL: Final = 1024  # entries of a table that a GPU is sent whole: one copy, where single entries take five calls


class BlockIndex:
    """The blocks of every row as a tensor (rows, blocks) int32, 0 where a row has none.

    It is given the lists of blocks that the host keeps, and sends what has changed since. The tensor stays where it is
    until it is too small, so that a captured step finds it there.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.table = self._make((1, _NARROWEST))
        self._sent: list[list[int]] = [[]]

    def update(self, rows: Sequence[Sequence[int]], num_blocks: int = 0) -> None:
        """Send what the rows hold now, in a table of at least `num_blocks` blocks a row."""
        width = max(num_blocks, *map(len, rows)) if rows else num_blocks
        if len(rows) > self.table.shape[0] or width > self.table.shape[1]:
            size = (_round_up(max(len(rows), self.table.shape[0])), _round_up(max(width, self.table.shape[1])))
            self.table = self._make(size)
            self._sent = [[] for _ in range(size[0])]
        width = self.table.shape[1]
        at: list[int] = []
        changed: list[int] = []
        for row, (blocks, sent) in enumerate(zip(rows, self._sent, strict=False)):
            if blocks == sent:
                continue
            for place in range(max(len(blocks), len(sent))):
                new = blocks[place] if place < len(blocks) else NOBODYS
                if place >= len(sent) or new != sent[place]:
                    at.append(row * width + place)
                    changed.append(new)
            self._sent[row] = list(blocks)
        is_small = self.device.type == "cuda" and self.table.numel() <= _SMALL
        if len(at) > _MOST_SENT or (at and is_small):
            self._send_whole()
        elif at:
            self._write(at, changed)

    def add(self, rows: Sequence[int], blocks: Sequence[int]) -> bool:
        """Let the device know of one more block of each of these rows; False if the table is too small."""
        width = self.table.shape[1]
        if any(len(self._sent[row]) >= width for row in rows):
            return False
        at = [row * width + len(self._sent[row]) for row in rows]
        for row, block in zip(rows, blocks, strict=True):
            self._sent[row].append(block)
        self._write(at, blocks)
        return True

    def _send_whole(self) -> None:
        width, is_gpu = self.table.shape[1], self.device.type == "cuda"
        whole = [[*sent, *[NOBODYS] * (width - len(sent))] for sent in self._sent]
        self.table.copy_(torch.tensor(whole, dtype=torch.int32, pin_memory=is_gpu), non_blocking=is_gpu)

    def _write(self, at: Sequence[int], blocks: Sequence[int]) -> None:
        sent = send([*at, *blocks], self.device)  # one copy for both
        self.table.view(-1).index_copy_(0, sent[: len(at)], sent[len(at) :].to(torch.int32))

    def _make(self, size: tuple[int, int]) -> torch.Tensor:
        with torch.inference_mode(False):  # or it could not be changed outside of that mode
            return torch.zeros(size, dtype=torch.int32, device=self.device)

    def find_flat_slots(self, rows: torch.Tensor, positions: torch.Tensor, block_size: int) -> torch.Tensor:
        """Where positions (count,) of rows (count,) lie among all blocks' places: (count,) int64."""
        return self.table[rows, positions // block_size].long() * block_size + positions % block_size

    def find_slots(self, positions: torch.Tensor, block_size: int) -> torch.Tensor:
        """Where positions (rows, count) lie among all blocks' places: (rows, count) int64."""
        blocks = self.table[: len(positions)].gather(1, positions // block_size)
        return blocks.long() * block_size + positions % block_size

    def find_blocks(self, rows: int, count: int) -> torch.Tensor:
        """The first `count` blocks of every row, one row after the other: (rows * count,) int64."""
        return self.table[:rows, :count].flatten().long()


def _round_up(count: int) -> int:
    return 1 << (count - 1).bit_length()
