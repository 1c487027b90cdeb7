"""The cache in blocks: a row takes blocks of positions as it grows, and rows share those that they have in common."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any, Self, cast

import torch

from unspool.cache.base import Cache
from unspool.cache.contract.capabilities import (
    DIVIDE,
    FIXED_SHAPE,
    FLAT,
    FORK,
    JOIN,
    RAGGED,
    ROLL_BACK,
    SELECT_ROWS,
    TRIAL,
)
from unspool.cache.files import check_room
from unspool.cache.paged.blocks import BlockStore
from unspool.cache.paged.growth import Growth
from unspool.cache.paged.packed_blocks import PackedBlockStore
from unspool.cache.paged.pool import BLOCK_SIZE, MOST_BLOCKS, BlockPool, check_pool
from unspool.cache.span import Span
from unspool.cache.stored import StoredCache
from unspool.cache.stores.quantization import QuantizedCacheConfig
from unspool.errors import SettingError, UnsupportedError


class PagedCache(StoredCache):
    """A cache whose rows hold blocks of a pool (`BlockPool`): memory for what rows hold, not rows times the longest.

    Selecting, repeating and cloning rows shares blocks; the last one, partly filled, is copied by a row that writes it
    first. Caches with one `pool` share what they have in common and what there is (`new_empty`). With `kinds` and
    `window`, layers that are "sliding" give back blocks that are out of view. With `cache_config`, blocks that are no
    longer recent are packed. Attention outside of passes by address reads keys that are gathered in order.
    """

    can = frozenset({ROLL_BACK, SELECT_ROWS, RAGGED, FORK, DIVIDE, FLAT, JOIN})
    _store: BlockStore | PackedBlockStore
    _growth: Growth | None = None  # when rows take their next blocks, in steps of one position
    _stepped: list[int] | None = None  # the lengths after the last step

    def __init__(
        self,
        pool: BlockPool | None = None,
        *,
        block_size: int | None = None,
        num_blocks: int | None = None,
        max_cache_len: int | None = None,
        kinds: Sequence[str] = (),
        window: int | None = None,
        cache_config: QuantizedCacheConfig | None = None,
    ) -> None:
        if pool is not None and (block_size is not None or num_blocks is not None):
            raise SettingError("a pool has its blocks; leave out block_size and num_blocks, or the pool")
        if cache_config is not None:
            self._pack_blocks(pool, cache_config, block_size, num_blocks)
        else:
            if pool is None:
                pool = BlockPool(BLOCK_SIZE if block_size is None else block_size, num_blocks)
            windows = [window if kind == "sliding" else None for kind in kinds]
            super().__init__(BlockStore(pool, windows))
            if any(each is not None for each in windows):
                self.can = frozenset({TRIAL, SELECT_ROWS, RAGGED, FLAT, JOIN})
        self.kinds, self.window, self.cache_config = tuple(kinds), window, cache_config
        if max_cache_len is not None and not 1 <= max_cache_len <= MOST_BLOCKS * self.pool.block_size:
            raise SettingError(f"`max_cache_len` of a paged cache must be a number of positions, not {max_cache_len!r}")
        self.max_cache_len = max_cache_len
        if self.pool.is_fixed:
            self.can = self.can | {FIXED_SHAPE}

    def _pack_blocks(
        self, pool: BlockPool | None, config: QuantizedCacheConfig, block_size: int | None, num_blocks: int | None
    ) -> None:
        if pool is not None:
            raise SettingError("a packed cache has pools of its own; caches beside it come from new_empty()")
        fit = config.find_backend().find_fit()
        size = max(BLOCK_SIZE, config.q_group_size) if block_size is None else block_size
        plain = BlockPool(size)
        if size % config.q_group_size:
            raise SettingError(f"`block_size`={size} must be a multiple of `q_group_size`={config.q_group_size}")
        packed = BlockPool(size, num_blocks, is_filled_at_once=True)
        packed.lock = plain.lock  # what holds the one still holds the other
        super().__init__(PackedBlockStore(config, fit, plain, packed))
        self.can, self.rolls_back_exactly = frozenset({ROLL_BACK, TRIAL, SELECT_ROWS, RAGGED, JOIN}), False

    @property
    def pool(self) -> BlockPool:
        """The blocks of plain keys."""
        return self._store.pool

    def advance(self, rows: int) -> None:
        if self._growth is not None and self._growth.fits(self.lengths) and len(self.lengths) == rows:
            self.lengths = self._growth.step()
            return
        follows = self._stepped is self.lengths  # two steps without anything in between: there will be more
        super().advance(rows)
        self._stepped, self._growth = self.lengths, None
        if follows and isinstance(self._store, BlockStore) and self.max_cache_len is None:
            table = self._store.find_only_table()
            self._growth = None if table is None else Growth.begin(table, self.lengths)

    def new_empty(self) -> Self:
        """A cache of the same kind without rows, over the same blocks."""
        made = self.clone()
        made.select_rows([])
        return made

    def _select_listed(self, index: Sequence[int]) -> None:  # blocks are listed on the host
        self._store.select(list(index), self.lengths)

    def _reserve_rows(self, starts: Sequence[int], stops: Sequence[int], stop: int) -> None:
        self._check_room(max(stops, default=0))
        self._store.reserve(starts, stops, max(stops, default=0))

    def _open_pass(self, starts: Sequence[int], stops: Sequence[int], stop: int) -> None:
        store = self._store
        if not isinstance(store, BlockStore):
            super()._open_pass(starts, stops, stop)
            return
        if not self.lengths:
            self._open(len(starts))
        self._check_room(max(stops, default=0))
        store.reserve_pass(starts, stops)

    def _check_room(self, stop: int) -> None:
        if self.max_cache_len is not None and stop > self.max_cache_len:
            raise SettingError(
                f"position {stop} does not fit a paged cache of {self.max_cache_len} positions a row; make it larger "
                "(max_cache_len), or leave it out, and rows grow while there are blocks"
            )

    def _open_forks(self, count: int) -> None:
        stops = [length + count for length in self.lengths]
        self._store.reserve(self.lengths, stops, max(stops))

    def make_room(self, rows: int, num_new: int) -> None:
        if len(self.lengths) == rows:
            stops = [start + num_new for start in self.lengths]
            self._reserve_rows(self.lengths, stops, max(stops))

    @property
    def longest_stretch(self) -> int | None:
        if not self.lengths:
            return 0
        limits = [] if self.max_cache_len is None else [self.max_cache_len - max(self.lengths)]
        if (steps := self._store.count_steps(self.lengths)) is not None:
            limits.append(steps)
        return max(1, min(limits)) if limits else None

    def get_max_cache_shape(self) -> int | None:
        limits = [] if self.max_cache_len is None else [self.max_cache_len]
        store, size = self._store, self.pool.block_size
        if isinstance(store, PackedBlockStore):
            most = store.packed_pool.max_blocks
            limits += [] if most is None else [most * size + store.config.residual_length]
        elif store.pool.max_blocks is not None:
            num_full = sum(group.window is None for group in store.groups)
            limits += [store.pool.max_blocks // num_full * size] if num_full else []
        return min(limits, default=None)

    # --- parts --------------------------------------------------------------------------------------
    def divide(self, num_parts: int, num_new: int) -> list[Cache]:  # a part makes room for itself
        self.require(DIVIDE)
        parts: list[Cache] = []
        for first in range(num_parts):
            part = copy(self)
            part.lengths = self.lengths[first::num_parts]
            part._store = self._plain.take_part(first, num_parts)
            parts.append(part)
        return parts

    def rejoin(self, parts: Sequence[Cache]) -> None:
        super().rejoin(parts)
        for table in self._plain.tables:
            table.version += 1  # the parts may have taken blocks for its rows

    @property
    def _plain(self) -> BlockStore:
        return cast("BlockStore", self._store)

    # --- files ---------------------------------------------------------------------------------------
    def _pack(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        store = self._store
        pool = store.packed_pool if isinstance(store, PackedBlockStore) else store.pool
        facts: dict[str, Any] = {
            "block_size": pool.block_size,
            "num_blocks": pool.max_blocks,
            "max_cache_len": self.max_cache_len,
        }
        if self.kinds:
            facts |= {"kinds": list(self.kinds), "window": self.window}
        if self.cache_config is not None:
            config = self.cache_config
            facts["cache_config"] = {**config.to_dict(), "compute_dtype": str(config.compute_dtype)}
        held, tensors = store.pack(self.lengths)
        return {**facts, **held}, tensors

    @classmethod
    def _unpack(cls, facts: dict[str, Any], tensors: dict[str, torch.Tensor], lengths: list[int]) -> PagedCache:
        kinds, window = [str(kind) for kind in facts.get("kinds", ())], facts.get("window")
        if "sliding" in kinds and not (type(window) is int and window > 0):
            raise ValueError(f"a window of {window!r}")
        config, num_blocks = facts.get("cache_config"), facts["num_blocks"]
        if num_blocks is not None:  # a pool of a fixed size takes all its memory at once
            check_pool(facts["block_size"], num_blocks)
            check_room(num_blocks * sum(one.nbytes // max(1, len(one)) for one in tensors.values()), tensors)
        cache = cls(
            **{name: facts[name] for name in ("block_size", "num_blocks", "max_cache_len")},
            kinds=kinds,
            window=window,
            cache_config=None if config is None else QuantizedCacheConfig(**config),
        )
        cache._store.unpack(facts, tensors, lengths)
        cache.lengths = list(lengths)
        return cache

    # --- the reference's surface ---------------------------------------------------------------------
    def _append(self, layer: int, span: Span, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.kinds or self.cache_config is not None:
            raise UnsupportedError("blocks that are packed or let go are written by begin(), write() and end() alone")
        return super()._append(layer, span, kv)

    def __len__(self) -> int:
        return super().__len__() if self.lengths else 0
