"""The engine's memory: blocks of a pool for models with keys, or a count of them for models that keep others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from unspool.cache import BlockPool, KeyShape, PagedCache, find_kind, read_options
from unspool.cache.paged.joint import close_pools, find_counted, list_windows
from unspool.cache.stores.quantization import OPTIONS, read_quantized_config
from unspool.engine.drafts import DraftPools
from unspool.engine.prefixes import PrefixIndex
from unspool.engine.scheduler import BlockUse
from unspool.errors import SettingError, UnsupportedError
from unspool.protocols import Model

KINDS: Final = ("paged", "paged_hybrid", "paged_quantized")  # that an engine's keys can lie in
_PART_OF_GPU: Final = 0.8  # of what is free, where nobody says how much
_PART_OF_HOST: Final = 0.25  # of what the machine has
_MOST_OF_FREE: Final = 0.97  # for keys and passes together
_PADDED: Final = 1.5  # tokens of a pass over prompts of several lengths, for each of theirs
_HEADS: Final = 10  # copies of the logits of all rows: captured steps of fewer rows have theirs, and so have processors
_USUAL_ROW: Final = 4096  # positions that every row can have, where there is so much
_FEWEST: Final = 16  # blocks


class EngineMemory:
    """Blocks that can be taken, those of idle prefixes included, and the caches over them."""

    def __init__(
        self, layout: BlockLayout, num_blocks: int, max_rows: int, *, has_blocks: bool, shares_prefixes: bool | None
    ) -> None:
        self.kind, self.config, self.use = layout.kind, layout.config, layout.use
        self.num_blocks, self.block_size = num_blocks, layout.block_size
        self._first = layout.make_cache(num_blocks) if has_blocks else None
        if self._first is not None:
            self._first.pool.ensure(layout.num_apart * max_rows)  # they would move later, to make room
        self.pool = None if self._first is None else self._first.pool  # what caches have in common
        self._counted = None if self._first is None else find_counted(self._first)  # the blocks that run out
        can_share = self.kind == "paged"
        if shares_prefixes and not can_share:
            raise SettingError(
                f"`share_prefixes` finds blocks again by what they hold, and those of a {self.kind!r} cache are let go "
                "or packed; leave it out"
            )
        shares = can_share and shares_prefixes is not False
        self.prefixes = PrefixIndex(self.pool) if self.pool is not None and shares else None
        self.drafts = DraftPools(layout.block_size)
        self._num_idle: int | None = None
        self.on_release: Callable[[int], None] = lambda _: None

    @property
    def is_packed(self) -> bool:
        """Whether keys are packed: what is read again, or in other pieces, is not what was read before."""
        return self.kind == "paged_quantized"

    @property
    def counted(self) -> BlockPool | None:
        """The pool whose blocks are counted; None without blocks."""
        return self._counted

    def new_cache(self) -> PagedCache:
        """A cache without rows over the blocks."""
        assert self._first is not None and self.pool is not None
        return PagedCache(self.pool) if self.kind == "paged" else self._first.new_empty()

    def has(self, count: int) -> bool:
        """Whether so many blocks can be taken."""
        if self._counted is None:
            return count <= self.num_blocks  # what was promised is all that is counted
        missing = count - self._counted.num_free
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
        """Give all memory back, whoever still holds a cache over it."""
        if self.prefixes is not None:
            self.prefixes.clear()
        self.drafts.clear()
        if self._first is not None:
            close_pools(self._first)


class BlockLayout:
    """How a model's keys lie in blocks of a kind: what a block takes, and which blocks a row takes."""

    def __init__(self, model: Model, kind: str, config: Any, block_size: int) -> None:
        if kind not in KINDS:
            raise SettingError(
                f"`cache_implementation` of an engine is one of {', '.join(map(repr, KINDS))}, not {kind!r:.40}; a "
                "request may have any kind, outside of the engine's blocks"
            )
        self._model, self.kind, self.block_size = model, kind, block_size
        self.config: dict[str, Any] = read_options(kind, config)
        for name in ("block_size", "num_blocks", "max_cache_len", "batch_size"):
            if name in self.config:
                raise SettingError(f"{name!r} is for a call's own cache; an engine takes `block_size` and `memory`")
        shape: KeyShape | None = getattr(model, "key_shape", None)
        if kind != "paged":
            refuse = find_kind(kind).refuse
            if shape is None or "state" in model.info.layer_kinds or (refuse is not None and refuse(model.info)):
                raise UnsupportedError(f"a {model.info.family} model can't have a {kind!r} cache; leave it out")
        self._shape = shape
        self.use = self._find_use()

    def _find_use(self) -> BlockUse:
        if self.kind == "paged_quantized":
            return BlockUse(lag=read_quantized_config(self._packing).residual_length - 1)
        if self.kind == "paged_hybrid":
            windows = list_windows(self.make_cache(1))
            num_sliding = sum(window is not None for window in windows)
            return BlockUse(len(windows) - num_sliding, num_sliding, max(one or 0 for one in windows))
        return BlockUse()

    @property
    def _packing(self) -> Mapping[str, Any]:
        return {name: value for name, value in self.config.items() if name in OPTIONS}

    def make_cache(self, num_blocks: int) -> PagedCache:
        """A cache without rows over so many blocks."""
        if self._shape is None or self.kind == "paged":
            return PagedCache(BlockPool(self.block_size, num_blocks))
        options = {**self.config, "block_size": self.block_size, "num_blocks": num_blocks}
        made = find_kind(self.kind).make(self._shape, 0, None, options)
        assert isinstance(made, PagedCache)
        return made

    def count_blocks(self, memory: int | None, max_rows: int, tokens_per_pass: int) -> int:
        """How many blocks an engine takes: as many as `memory` bytes hold, or as the machine can spare for all rows
        beside the largest pass."""
        per_block = self.count_block_bytes()
        apart = self.num_apart * max_rows * self.block_size * count_position_bytes(self._model)
        if memory is not None:
            if isinstance(memory, bool) or not isinstance(memory, int) or memory < 1:
                raise SettingError(f"`memory` is a number of bytes for keys and values, not {memory!r:.40}")
            blocks = (memory - apart) // per_block
            if blocks < 1:
                beside = f" beside {apart} for what {max_rows} rows keep as it is" if apart else ""
                raise SettingError(
                    f"`memory`={memory} bytes are too few for one block of {self.block_size} positions, which takes "
                    f"{per_block}{beside}"
                )
            return int(blocks)
        longest = min(self._model.info.max_context or _USUAL_ROW, _USUAL_ROW)
        wanted = max_rows * max(1, self.use.count(longest, longest, self.block_size))
        return int(max(_FEWEST, min(wanted, (self._find_spare(max_rows, tokens_per_pass) - apart) // per_block)))

    def _find_spare(self, max_rows: int, tokens_per_pass: int) -> int:
        device = self._model.device
        free, part = _find_free(device), _PART_OF_GPU if device.type == "cuda" else _PART_OF_HOST
        return int(min(free * part, free * _MOST_OF_FREE - count_pass_bytes(self._model, tokens_per_pass, max_rows)))

    def count_block_bytes(self) -> int:
        """Bytes of one block in all the layers that share it."""
        whole = max(1, count_position_bytes(self._model)) * self.block_size
        if self.kind == "paged_quantized":
            shape = self._shape
            assert shape is not None
            schemes = read_quantized_config(self._packing).make_schemes(shape.head_dim)
            parts = (part for one in schemes for part in one.shapes_of(1, shape.num_kv_heads, self.block_size))
            return shape.num_layers * sum(torch.Size(size).numel() * dtype.itemsize for size, dtype in parts)
        kinds = self._shape.layer_kinds if self._shape is not None and self.kind == "paged_hybrid" else ()
        counts = [kinds.count(kind) for kind in dict.fromkeys(kinds)]
        return whole * min(counts) // len(kinds) if len(counts) > 1 else whole

    @property
    def num_apart(self) -> int:
        """Blocks of plain keys that a row has beside those that are counted."""
        return 2 + -(-(self.use.lag + 1) // self.block_size) if self.kind == "paged_quantized" else 0


def count_position_bytes(model: Model) -> int:
    """Bytes of keys and values that one position of one row takes in all layers; 0 if the model does not say."""
    shape: Any = getattr(model, "key_shape", None)
    if shape is None:
        return 0
    return int(shape.num_layers * 2 * shape.num_kv_heads * shape.head_dim * shape.dtype.itemsize)


def count_pass_bytes(model: Model, num_tokens: int, num_rows: int) -> int:
    """Bytes that an engine's own passes take at most, about: states of one over so many tokens of prompts, and the
    logits of so many rows."""
    info = model.info
    ffn = getattr(getattr(model, "spec", None), "ffn_size", None)
    width = 6 * info.hidden_size + 3 * (ffn if isinstance(ffn, int) else 4 * info.hidden_size)
    states = num_tokens * _PADDED * width * model.dtype.itemsize
    return int(states + _HEADS * num_rows * info.vocab_size * torch.float32.itemsize)


def _find_free(device: torch.device) -> int:
    if device.type == "cuda":  # torch's own spare pieces are given back to the device when they are needed
        spare = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + spare
    import os

    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
