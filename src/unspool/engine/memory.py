"""The engine's memory: blocks of a pool for models with keys, or a count of them for models that keep others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from unspool.cache import BlockPool
from unspool.engine.prefixes import PrefixIndex
from unspool.errors import SettingError
from unspool.protocols import Model

_PART_OF_GPU: Final = 0.8  # of what is free, where nobody says how much
_PART_OF_HOST: Final = 0.25  # of what the machine has
_USUAL_ROW: Final = 4096  # positions that every row can have, where there is so much
_FEWEST: Final = 16  # blocks


class EngineMemory:
    """Blocks that can be taken, those of idle prefixes included."""

    def __init__(self, pool: BlockPool | None, num_blocks: int, block_size: int, *, shares_prefixes: bool) -> None:
        self.pool, self.num_blocks, self.block_size = pool, num_blocks, block_size
        self.prefixes = PrefixIndex(pool) if pool is not None and shares_prefixes else None
        self._num_idle: int | None = None
        self.on_release: Callable[[int], None] = lambda _: None

    def has(self, count: int) -> bool:
        """Whether so many blocks can be taken."""
        if self.pool is None:
            return count <= self.num_blocks  # what was promised is all that is counted
        missing = count - self.pool.num_free
        if missing <= 0 or self.prefixes is None or missing > len(self.prefixes):
            return missing <= 0
        if self._num_idle is None:  # counted once a turn: there may be thousands
            self._num_idle = self.prefixes.count_idle()
        return missing <= self._num_idle

    def begin_turn(self) -> None:
        """Count anew what could be given up."""
        self._num_idle = None

    def make_free(self, count: int) -> None:
        """Give up idle prefixes until so many blocks are free, or none is left."""
        if self.pool is not None and self.prefixes is not None and self.pool.num_free < count:
            self.prefixes.evict(count - self.pool.num_free)
            self._num_idle = None

    def release(self, number: int) -> None:
        """Give back what an entry holds."""
        self.on_release(number)
        self._num_idle = None

    def close(self) -> None:
        """Give back what is kept."""
        if self.prefixes is not None:
            self.prefixes.clear()


def count_position_bytes(model: Model) -> int:
    """Bytes of keys and values that one position of one row takes in all layers; 0 if the model does not say."""
    shape: Any = getattr(model, "key_shape", None)
    if shape is None:
        return 0
    return int(shape.num_layers * 2 * shape.num_kv_heads * shape.head_dim * shape.dtype.itemsize)


def count_blocks(model: Model, block_size: int, memory: int | None, max_rows: int) -> int:
    """How many blocks an engine takes: as many as `memory` bytes hold, or as the machine can spare for all rows."""
    per_block = max(1, count_position_bytes(model)) * block_size
    if memory is not None:
        if isinstance(memory, bool) or not isinstance(memory, int) or memory < 1:
            raise SettingError(f"`memory` is a number of bytes for keys and values, not {memory!r:.40}")
        blocks = memory // per_block
        if blocks < 1:
            raise SettingError(
                f"`memory`={memory} bytes are too few for one block of {block_size} positions, which takes {per_block}"
            )
        return int(blocks)
    longest = min(model.info.max_context or _USUAL_ROW, _USUAL_ROW)
    wanted = max_rows * -(-longest // block_size)
    return int(max(_FEWEST, min(wanted, _find_spare(model.device) // per_block)))


def _find_spare(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * _PART_OF_GPU)
    import os

    return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * _PART_OF_HOST)
