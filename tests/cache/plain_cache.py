"""The kinds of cache that every suite runs over, and the slow and obvious cache that they are compared with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from unspool.cache import (
    Cache,
    DynamicCache,
    EncoderDecoderCache,
    HybridCache,
    Mask,
    OffloadedCache,
    OffloadedStaticCache,
    PagedCache,
    QuantizedCache,
    QuantizedCacheConfig,
    QuantizedHybridCache,
    QuantizedStaticCache,
    SinkCache,
    SlidingWindowCache,
    Span,
    StaticCache,
)
from unspool.cache.offload.memory import take_mapped
from unspool.cache.sink import BLOCK
from unspool.kernels.packed_keys import PackedKeys

LAYERS, HEADS, WIDTH = 2, 2, 3
ROOM, MOST_ROWS = 300, 6
# Of a long prompt's queries the first and the last are looked at, and one in so many between (blocks have 16 and more).
LOOKED_AT_FIRST, LOOKED_AT_EVERY = 40, 7
SIZES = SimpleNamespace(num_attention_heads=HEADS, hidden_size=HEADS * WIDTH, num_hidden_layers=LAYERS)


WINDOW, NUM_SINKS = 6, 2
SLIDING = SimpleNamespace(**vars(SIZES), sliding_window=WINDOW)
MIXED = SimpleNamespace(**vars(SLIDING), layer_types=["sliding_attention", "full_attention"])

ALL_SLIDING = SimpleNamespace(**vars(SLIDING), layer_types=["sliding_attention"] * LAYERS)


class NoTurns:
    """Keys that hold no positions: a SinkCache that moves them leaves them as they are."""

    can_shift = True

    def find_turns(self, layer: int, shifts: torch.Tensor) -> None:
        return None


def make_sink() -> SinkCache:
    cache = SinkCache(WINDOW + NUM_SINKS, NUM_SINKS)
    cache.attach(NoTurns())
    return cache


# Groups of one number lose nothing: their zero point is the number. So what packed kinds keep, move, drop and save can
# be held to equality here; test_quantized.py holds the same machinery with larger groups to its bound.
RESIDUAL = 2
LOSSLESS = QuantizedCacheConfig(
    "unspool", nbits=8, axis_value=1, q_group_size=1, residual_length=RESIDUAL, compute_dtype=torch.float32
)


def make_packed_hybrid(**more: Any) -> QuantizedHybridCache:
    return QuantizedHybridCache(LOSSLESS, MIXED, MOST_ROWS, ROOM, **more)


IN_ORDER: dict[str, Callable[[], Cache]] = {
    "dynamic": DynamicCache,
    "static": lambda: StaticCache(SIZES, MOST_ROWS, ROOM),
    "offloaded": OffloadedCache,
    "offloaded static": lambda: OffloadedStaticCache(SIZES, MOST_ROWS, ROOM, "cpu"),
    "quantized": lambda: QuantizedCache(LOSSLESS),
    "quantized static": lambda: QuantizedStaticCache(LOSSLESS, SIZES, MOST_ROWS, ROOM),
    "paged": PagedCache,
    "paged in small blocks": lambda: PagedCache(block_size=16, num_blocks=MOST_ROWS * 40, max_cache_len=600),
    "paged quantized": lambda: PagedCache(block_size=16, cache_config=LOSSLESS),
    "paged quantized, bounded": lambda: PagedCache(block_size=32, num_blocks=MOST_ROWS * 20, cache_config=LOSSLESS),
    "pair": lambda: EncoderDecoderCache(DynamicCache(), DynamicCache()),
    "pair of paged": lambda: EncoderDecoderCache(PagedCache(), DynamicCache()),
    "pair of static": lambda: EncoderDecoderCache(StaticCache(SIZES, MOST_ROWS, ROOM), DynamicCache()),
}
KINDS: dict[str, Callable[[], Cache]] = {
    **IN_ORDER,
    "sliding": lambda: SlidingWindowCache(SLIDING, MOST_ROWS),
    "hybrid": lambda: HybridCache(MIXED, MOST_ROWS, ROOM),
    "paged hybrid": lambda: PagedCache(block_size=16, kinds=("sliding", "full"), window=WINDOW),
    "paged sliding": lambda: PagedCache(block_size=16, num_blocks=200, kinds=("sliding",) * LAYERS, window=WINDOW),
    "quantized hybrid": make_packed_hybrid,
    "quantized sliding": lambda: QuantizedHybridCache(LOSSLESS, ALL_SLIDING, MOST_ROWS, ROOM),
    "offloaded quantized hybrid": lambda: make_packed_hybrid(allocate=lambda *room: take_mapped(*room[:2])),
    "sink": make_sink,
}


# What each layer of a kind lets its queries see: as far back as a window, and pinned positions; all without one.
def find_windows(cache: Cache) -> list[int | None]:
    if isinstance(cache, SinkCache):
        return [WINDOW] * LAYERS
    return [WINDOW if kind == "sliding" else None for kind in getattr(cache, "kinds", ()) or ["full"] * LAYERS]


def spread(mask: Mask, span: Span, num_keys: int | None = None) -> torch.Tensor:
    """A mask in whatever form, as booleans (rows, new, keys)."""
    shape = (len(span.starts), span.num_new, span.stop if num_keys is None else num_keys)
    if mask is None:
        return torch.ones(shape, dtype=torch.bool)
    if isinstance(mask, str):
        assert mask == "causal" and span.num_new == shape[2]
        return torch.ones(shape[1:], dtype=torch.bool).tril().expand(shape)
    return mask[:, 0].expand(shape)


def define(span: Span, window: int | None) -> torch.Tensor:
    """What a mask is: every key up to the query's own position, as far back as the window goes."""
    return torch.tensor(
        [
            [[k <= start + n and (window is None or k > start + n - window) for k in range(span.stop)] for n in new]
            for start, new in ((start, range(span.num_new)) for start in span.starts)
        ]
    )


@dataclass
class Rows(ABC):
    """Rows of a batch beside the cache that holds them: what they go through happens to both."""

    cache: Cache
    rows: list[list[Any]]

    @abstractmethod
    def read(self, num_new: int, counts: list[int] | None = None) -> None:
        """One forward pass, checked."""

    def attempt(self, num_new: int, kept: list[int]) -> None:
        """Tokens that are tried, of which each row keeps some."""
        before = list(self.cache.lengths)
        self.cache.begin_trial()
        self.read(num_new)
        self.truncate([held + count for held, count in zip(before, kept, strict=True)])

    def truncate(self, lengths: list[int]) -> None:
        self.cache.truncate(lengths)
        self.rows = [row[:length] for row, length in zip(self.rows, lengths, strict=True)]
        assert self.cache.lengths == lengths

    def select(self, index: list[int]) -> None:
        self.cache.select_rows(index)
        self.rows = [list(self.rows[i]) for i in index]
        assert self.cache.lengths == [len(row) for row in self.rows]
        if not self.cache.is_endless:  # the longest row may have left
            assert self.cache.get_seq_length() == max(self.cache.lengths, default=0)


@dataclass
class Plain(Rows):
    """The slow and obvious cache: a list of numbers for each row, each standing for a position's keys and values."""

    written: int = 0

    def read(self, num_new: int, counts: list[int] | None = None) -> None:
        """One forward pass over distinct numbers, checked in every layer for every real query, or many of them."""
        real = counts or [num_new] * len(self.rows)
        starts = [len(row) for row in self.rows]
        span = self.cache.begin(len(self.rows), num_new, counts)
        assert (span.counts, span.num_new) == (real, num_new)
        if not self.cache.is_endless:  # there positions are counted anew now and then
            assert span.starts == starts
            assert span.stop == max(starts) + num_new
            assert span.is_uniform == (len(set(starts)) == 1)
            assert span.positions.tolist() == [[start + n for n in range(num_new)] for start in starts]
        new = torch.arange(len(self.rows) * num_new, dtype=torch.float32).view(len(self.rows), num_new) + self.written
        self.written += new.numel()
        for row, count in enumerate(real):
            self.rows[row] = self.rows[row] + new[row, :count].tolist()
            new[row, count:] = torch.nan  # junk past a row's end: whoever reads it can't hide it
        windows = find_windows(self.cache)
        masks = [self.cache.mask(span, window) for window in windows]
        for layer in range(LAYERS):
            keys, values = (unpack(part, masks[layer], span) for part in self.cache.write(layer, fill(new, layer)))
            assert keys.shape == values.shape == (len(self.rows), HEADS, keys.shape[2], WIDTH)
            visible = spread(masks[layer], span, keys.shape[2])
            for row, count in enumerate(real):
                for n in range(count):
                    if LOOKED_AT_FIRST < n < count - LOOKED_AT_FIRST and n % LOOKED_AT_EVERY:
                        continue
                    seen = self.find_seen(row, starts[row] + n, windows[layer])
                    check_read(keys[row][:, visible[row, n]], values[row][:, visible[row, n]], seen, layer)
        self.cache.end()
        assert self.cache.lengths == [len(row) for row in self.rows]
        kept = max(self.cache.lengths)
        assert self.cache.get_seq_length() == (min(kept, WINDOW + NUM_SINKS) if self.cache.is_endless else kept)

    def find_seen(self, row: int, position: int, window: int | None) -> list[float]:
        """What the query at a position sees of its row, by definition."""
        first = 0 if window is None else max(0, position + 1 - window)
        pinned = range(0)
        if self.cache.is_endless:  # sinks stand nearer than they were written, and a window counts from there
            moved = max(0, position + 1 - WINDOW - NUM_SINKS) // BLOCK * BLOCK
            pinned = range(max(0, first - moved), NUM_SINKS)
        return [self.rows[row][place] for place in range(position + 1) if place >= first or place in pinned]


def unpack(part: Any, mask: Mask, span: Span) -> torch.Tensor:
    """Keys (or values) as a tensor, with as many places as their mask speaks of."""
    if isinstance(part, torch.Tensor):
        return part
    assert isinstance(part, PackedKeys)
    return part.unpack(mask.shape[-1] if isinstance(mask, torch.Tensor) else span.stop)


def check_read(keys: torch.Tensor, values: torch.Tensor, seen: list[float], layer: int) -> None:
    """The visible keys and values (heads, keys, width) are those of the numbers, in whatever order they lie."""
    assert keys.shape[1] == len(seen)
    order = keys[0, :, 0].argsort()
    expected = fill(torch.tensor(seen)[None], layer)[0]  # (positions, 2, heads, width)
    assert torch.equal(keys[:, order], expected[:, 0].transpose(0, 1))
    assert torch.equal(values[:, order], expected[:, 1].transpose(0, 1))


def fill(numbers: torch.Tensor, layer: int) -> torch.Tensor:
    """(rows, new) as keys and values (rows, new, 2, heads, width), different in every layer, head and place."""
    place = torch.arange(2 * HEADS * WIDTH, dtype=torch.float32).view(2, HEADS, WIDTH)
    return numbers[:, :, None, None, None] * 100 + place + layer * 50


def join(plain: Plain, other: Plain) -> None:
    plain.cache.join(other.cache)
    plain.rows = [*plain.rows, *map(list, other.rows)]
    plain.written = max(plain.written, other.written)
    assert plain.cache.lengths == [len(row) for row in plain.rows]


def take(plain: Plain, index: list[int]) -> Plain:
    return Plain(plain.cache.take_rows(index), [list(plain.rows[row]) for row in index], plain.written + 1000)
