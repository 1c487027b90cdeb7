"""One suite for every kind of cache: what is written is read back at its position, row by row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unspool.cache import (
    BRANCH,
    BRANCH_SOURCE,
    DIVIDE,
    FIXED_SHAPE,
    FLAT,
    FORK,
    JOIN,
    LEGACY,
    RAGGED,
    ROLL_BACK,
    SELECT_ROWS,
    TRIAL,
    BlockPool,
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
from unspool.errors import LoadError, ResourceError, SettingError, UnspoolError, UnsupportedError
from unspool.kernels.packed import PackedKeys
from unspool.kernels.ragged import Ragged

LAYERS, HEADS, WIDTH = 2, 2, 3
ROOM, MOST_ROWS = 300, 6
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


@pytest.fixture(params=KINDS)
def cache(request: pytest.FixtureRequest) -> Cache:
    return KINDS[request.param]()


@pytest.fixture(params=IN_ORDER)
def in_order(request: pytest.FixtureRequest) -> Cache:
    return IN_ORDER[request.param]()


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
class Plain:
    """The slow and obvious cache: a list of numbers a row, each standing for a position's keys and values."""

    cache: Cache
    rows: list[list[float]]
    written: int = 0

    def read(self, num_new: int, counts: list[int] | None = None) -> None:
        """One forward pass over distinct numbers, checked in every layer for every real query."""
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
                    seen = self.find_seen(row, starts[row] + n, windows[layer])
                    check_read(keys[row][:, visible[row, n]], values[row][:, visible[row, n]], seen, layer)
        self.cache.end()
        assert self.cache.lengths == [len(row) for row in self.rows]
        kept = max(self.cache.lengths)
        assert self.cache.get_seq_length() == (min(kept, WINDOW + NUM_SINKS) if self.cache.is_endless else kept)

    def find_seen(self, row: int, position: int, window: int | None) -> list[float]:
        """What the query at a position sees of its row, by definition."""
        pinned = NUM_SINKS if self.cache.is_endless else 0
        first = 0 if window is None else max(0, position + 1 - window)
        return [self.rows[row][place] for place in range(position + 1) if place >= first or place < pinned]

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


# --- what is written is read back --------------------------------------------------------------------------


@pytest.mark.parametrize("counts", [None, [4, 4, 4], [1, 4, 2], [4, 0, 3]])
def test_prompts_and_steps_are_read_back(cache: Cache, counts: list[int] | None) -> None:
    plain = Plain(cache, [[], [], []])
    plain.read(4, counts)
    for _ in range(3):
        plain.read(1)
    plain.read(3, [3, 1, 2])
    plain.read(1)


def test_growth_keeps_what_is_held(cache: Cache) -> None:
    plain = Plain(cache, [[], []])
    plain.read(250, [250, 243])
    for _ in range(9):  # across the border of the first chunk, for both rows
        plain.read(1)
    plain.read(30, [30, 3])
    plain.read(1)


def test_flat_tokens_are_stored_where_filled_ones_are(cache: Cache) -> None:
    plain = Plain(cache, [[], [], []])
    plain.read(3, [3, 1, 2])
    if FLAT not in cache.can:
        with pytest.raises(UnsupportedError, match="take flat tokens"):
            cache.write_flat(0, torch.zeros(1, 2, HEADS, WIDTH), None)  # type: ignore[arg-type]  # never looked at
        return
    counts, new = [2, 0, 5], torch.arange(15.0).view(3, 5) + plain.written
    plain.written += new.numel()
    held: Any = getattr(cache, "self_attention_cache", cache)
    span = cache.begin(3, 5, counts)
    ragged = Ragged(span.starts, counts, span.positions)
    for row, count in enumerate(counts):
        plain.rows[row] = plain.rows[row] + new[row, :count].tolist()
    for layer in range(LAYERS):
        memory = held._held_tensors()[layer] if isinstance(held, PagedCache) else held.rows_of(layer)
        before = memory.clone()
        keys, values = cache.write_flat(layer, ragged.take(fill(new, layer)), ragged)
        for row, numbers in enumerate(plain.rows):
            expected = fill(torch.tensor([numbers]), layer)[0]  # (positions, 2, heads, width)
            assert torch.equal(keys[row, : len(numbers)], expected[:, 0])
            assert torch.equal(values[row, : len(numbers)], expected[:, 1])
        is_other = memory.nan_to_num(nan=-1.0) != before.nan_to_num(nan=-1.0)
        assert is_other.flatten(2).any(2).sum() == sum(counts)  # nothing is written past a row's end
    cache.end()
    plain.read(1)


def test_what_is_rolled_back_is_rewritten(in_order: Cache) -> None:
    plain = Plain(in_order, [[], [], []])
    plain.read(5)
    plain.truncate([5, 2, 0])
    plain.read(2, [1, 2, 2])
    plain.truncate([0, 0, 0])
    plain.read(3)
    plain.read(1)


@pytest.mark.parametrize("index", [[1], [0, 2], [2, 0, 1], [1, 1, 0, 2, 2], [0, 1, 2]])
def test_selected_rows_go_on(cache: Cache, index: list[int]) -> None:
    plain = Plain(cache, [[], [], []])
    plain.read(4, [2, 4, 3])
    plain.select(index)
    plain.read(1)
    before = list(cache.lengths)
    cache.begin_trial()
    plain.read(2)
    plain.truncate(before)
    plain.read(1)


def test_what_was_tried_can_be_taken_back(cache: Cache) -> None:
    """Also what a ring wrote over, and more than it has places for."""
    plain = Plain(cache, [[], []])
    plain.read(9, [9, 3])
    for tried, kept in (([1, 1], [0, 1]), ([4, 2], [1, 0]), ([20, 20], [3, 17]), ([2, 0], [2, 0])):
        before = list(cache.lengths)
        cache.begin_trial()
        if tried == [2, 0]:
            plain.read(1, [1, 0])
            plain.read(1, [1, 0])
        else:
            plain.read(max(tried), tried)
        plain.truncate([held + n for held, n in zip(before, kept, strict=True)])
        plain.read(1)
    plain.truncate([0, cache.lengths[1]])  # to the beginning, always
    plain.read(3)
    plain.read(1)


def test_rows_move_amid_a_trial(cache: Cache) -> None:
    plain = Plain(cache, [[], []])
    plain.read(9, [9, 7])
    cache.begin_trial()
    plain.read(3)
    plain.select([1, 0, 1])
    plain.truncate([7, 10, 9])
    plain.read(2)


def test_a_ring_says_what_it_can_not_take_back() -> None:
    for kind in ("sliding", "hybrid", "sink"):
        plain = Plain(KINDS[kind](), [[]])
        plain.read(20)
        plain.truncate([19])  # one position is free: what it wrote over, no query sees again
        plain.read(2)
        with pytest.raises(UnsupportedError, match="can't roll back from 21 positions to 15"):
            plain.cache.truncate([15])
        assert plain.cache.lengths == [21]
        plain.read(1)


@pytest.mark.parametrize("kind", ["quantized hybrid", "quantized sliding", "offloaded quantized hybrid"])
def test_packed_windows_let_go_and_say_so(kind: str) -> None:
    plain = Plain(KINDS[kind](), [[], [], []])
    cache = plain.cache
    assert isinstance(cache, QuantizedHybridCache)
    plain.read(12, [12, 3, 9])
    size = cache.nbytes
    for turn in range(110):  # past the room of a window, so that it slides row by row
        plain.read(1)
        if turn % 9 == 0:
            plain.attempt(7, [turn % 8, 0, 3])
        if turn == 50:
            plain.select([2, 0, 0, 1])
            plain.attempt(2, [1, 2, 0, 1])
            plain.select([1, 3, 0])
    bases = cache._store.layers[0].bases
    assert all(base > 0 for base in bases) and len(set(bases)) > 1
    assert cache._store.layers[1].bases == (bases if cache.kinds[1] == "sliding" else [0, 0, 0])
    plain.truncate([length - 1 for length in cache.lengths])  # one position is free
    plain.read(1)
    before = list(cache.lengths)
    with pytest.raises(UnsupportedError, match=f"row 0 can't roll back to {bases[0] + 2} positions: a window of 6"):
        cache.truncate([bases[0] + 2, *before[1:]])
    assert cache.lengths == before and cache.nbytes == size
    plain.read(40, [40, 1, 0])  # a pass that the window is too small for
    plain.truncate([0, cache.lengths[1], cache.lengths[2]])
    plain.read(3)
    plain.read(1)


@st.composite
def operations(draw: st.DrawFn) -> list[tuple[str, Any]]:
    """A history of a batch: passes, rows rolled back, rows that leave, come twice or change places."""
    done: list[tuple[str, Any]] = []
    rows = draw(st.integers(1, 4))
    lengths = [0] * rows
    done.append(("rows", rows))
    for _ in range(draw(st.integers(1, 7))):
        what = draw(st.sampled_from(["read", "read", "step", "truncate", "attempt", "select"]))
        if what == "read":
            num_new = draw(st.integers(1, 9))
            counts = draw(st.lists(st.integers(0, num_new), min_size=rows, max_size=rows))
            done.append(("read", (num_new, counts)))
            lengths = [length + count for length, count in zip(lengths, counts, strict=True)]
        elif what == "step":
            done.append(("read", (1, None)))
            lengths = [length + 1 for length in lengths]
        elif what == "attempt" and len(done) > 1:
            num_new = draw(st.integers(1, 9))
            kept = draw(st.lists(st.integers(0, num_new), min_size=rows, max_size=rows))
            done.append(("attempt", (num_new, kept)))
            lengths = [length + count for length, count in zip(lengths, kept, strict=True)]
        elif what == "truncate" and len(done) > 1:
            lengths = [draw(st.integers(0, length)) for length in lengths]
            done.append(("truncate", list(lengths)))
        elif what == "select" and len(done) > 1:
            index = draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=MOST_ROWS))
            rows, lengths = len(index), [lengths[i] for i in index]
            done.append(("select", index))
    return done


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, deadline=None)
@given(history=operations())
def test_any_history_is_read_back(kind: str, history: list[tuple[str, Any]]) -> None:
    (_, rows), *rest = history
    plain = Plain(KINDS[kind](), [[] for _ in range(rows)])
    for what, value in rest:
        if what == "read":
            plain.read(*value)
        elif what == "attempt":
            plain.attempt(*value)
        elif what == "select":
            plain.select(value)
        elif ROLL_BACK in plain.cache.can:
            plain.truncate([min(new, held) for new, held in zip(value, plain.cache.lengths, strict=True)])
        else:  # what may have been written over is gone: to the beginning, or nowhere
            plain.truncate([held if new else 0 for new, held in zip(value, plain.cache.lengths, strict=True)])


@pytest.mark.parametrize("kind", IN_ORDER)
@settings(max_examples=60, deadline=None)
@given(
    starts=st.lists(st.integers(0, 12), min_size=1, max_size=4),
    num_new=st.integers(1, 6),
    window=st.none() | st.integers(1, 20),
)
def test_mask_is_its_definition(kind: str, starts: list[int], num_new: int, window: int | None) -> None:
    cache = KINDS[kind]()
    if max(starts) > 0:
        cache.begin(len(starts), max(starts), starts)
        cache.write(0, torch.zeros(len(starts), max(starts), 2, HEADS, WIDTH))
        cache.end()
    span = cache.begin(len(starts), num_new)
    mask = cache.mask(span, window)
    assert torch.equal(spread(mask, span), define(span, window))


def test_plain_masks_take_no_tensor(in_order: Cache) -> None:
    """The two cases every step meets must stay free: a first prompt is causal, a single step sees everything."""
    cache = in_order
    span = cache.begin(2, 5)
    assert cache.mask(span) == "causal"
    assert cache.mask(span, window=5) == "causal"
    assert isinstance(cache.mask(span, window=4), torch.Tensor)
    cache.end()
    assert cache.mask(cache.begin(2, 1)) is None


@pytest.mark.parametrize("kind", ["sliding", "hybrid", "sink"])
def test_masks_of_rings_take_no_tensor(kind: str) -> None:
    cache = KINDS[kind]()
    for num_new in (4, 1, 1, 1, 1, 1, 1, 1):
        span = cache.begin(2, num_new)
        assert cache.mask(span, WINDOW) == ("causal" if num_new > 1 else None)
        for layer in range(LAYERS):
            cache.write(layer, torch.zeros(2, num_new, 2, HEADS, WIDTH))
        cache.end()


# --- what a cache says of itself ----------------------------------------------------------------------------


def test_capabilities() -> None:
    both = {ROLL_BACK, SELECT_ROWS, RAGGED, FORK, DIVIDE, JOIN}
    assert KINDS["dynamic"]().can == both | {FLAT, BRANCH, LEGACY}
    assert KINDS["static"]().can == both | {FLAT, FIXED_SHAPE}
    assert KINDS["pair of static"]().can == both | {FLAT, BRANCH_SOURCE}
    assert KINDS["paged"]().can == both | {FLAT}
    assert KINDS["paged in small blocks"]().can == both | {FLAT, FIXED_SHAPE}
    assert KINDS["offloaded"]().can == both - {FORK, DIVIDE} | {LEGACY}
    assert KINDS["quantized"]().can == {ROLL_BACK, TRIAL, SELECT_ROWS, RAGGED, JOIN}
    assert KINDS["quantized static"]().can == {ROLL_BACK, TRIAL, SELECT_ROWS, RAGGED, FIXED_SHAPE, JOIN}
    for kind in ("sliding", "hybrid", "sink", "quantized hybrid", "quantized sliding"):
        assert {TRIAL, SELECT_ROWS, RAGGED, JOIN} <= KINDS[kind]().can and ROLL_BACK not in KINDS[kind]().can
    assert [KINDS[kind]().is_compileable for kind in ("dynamic", "static")] == [False, True]


def test_a_missing_capability_is_named(cache: Cache) -> None:
    with pytest.raises(UnsupportedError, match=f"{type(cache).__name__} can't fly far"):
        cache.require("fly_far")


def test_selecting_in_a_fresh_cache_changes_nothing(cache: Cache) -> None:
    cache.select_rows([0, 0])
    assert cache.lengths == []
    Plain(cache, [[]]).read(2)


# --- what can't be ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("counts", [[1], [1, 2, 3], [1, 5], [-1, 2]])
def test_counts_must_fit(cache: Cache, counts: list[int]) -> None:
    with pytest.raises(SettingError, match="do not fit 2 rows of 4"):
        cache.begin(2, 4, counts)
    assert cache.lengths == []  # a pass that never began leaves no trace
    Plain(cache, [[], [], []]).read(2)


def test_another_batch_is_refused(cache: Cache) -> None:
    plain = Plain(cache, [[], []])
    plain.read(3)
    with pytest.raises(SettingError, match="holds 2 rows and the forward pass has 3"):
        cache.begin(3, 1)
    plain.read(1)


@pytest.mark.parametrize("lengths", [[3], [4, 3], [-1, 2], [3, 3, 3]])
def test_rolling_back_goes_back_only(cache: Cache, lengths: list[int]) -> None:
    plain = Plain(cache, [[], []])
    plain.read(3)
    with pytest.raises(SettingError, match="can't roll back"):
        cache.truncate(lengths)
    assert cache.lengths == [3, 3]
    plain.read(1)


def test_writing_needs_a_pass(cache: Cache) -> None:
    kv = torch.zeros(1, 1, 2, HEADS, WIDTH)
    with pytest.raises(RuntimeError, match="between begin"):
        cache.write(0, kv)
    with pytest.raises(RuntimeError, match="between begin"):
        cache.end()


def test_layers_come_in_order() -> None:
    cache = DynamicCache()
    cache.begin(1, 1)
    with pytest.raises(SettingError, match="layer 1 is written before layer 0"):
        cache.write(1, torch.zeros(1, 1, 2, HEADS, WIDTH))


@pytest.mark.parametrize("kind", ["static", "pair of static", "quantized static", "quantized hybrid"])
def test_static_refuses_what_does_not_fit(kind: str) -> None:
    cache = KINDS[kind]()
    with pytest.raises(SettingError, match=f"{MOST_ROWS + 1} rows do not fit .*max_batch_size={MOST_ROWS}"):
        cache.begin(MOST_ROWS + 1, 1)
    plain = Plain(cache, [[], []])
    plain.read(ROOM - 1)
    with pytest.raises(SettingError, match=f"position {ROOM + 1} does not fit .*{ROOM} positions"):
        cache.begin(2, 2)
    plain.read(1)  # the refusal left nothing behind, and the last position can be used
    with pytest.raises(SettingError, match="rows do not fit"):
        cache.select_rows([0] * (MOST_ROWS + 1))
    plain.select([1, 0])


@pytest.mark.parametrize(("rows", "room"), [(0, 4), (2, -1)])
def test_static_needs_room(rows: int, room: int) -> None:
    with pytest.raises(UnspoolError, match="at least one row and one position"):
        StaticCache(SIZES, rows, room)


@pytest.mark.parametrize("lengths", [[3, 3, 3, 3], [1, 4, 2, 3, 5, 2]])
def test_parts_write_into_the_whole(cache: Cache, lengths: list[int]) -> None:
    """A pass over every second row at a time leaves what one pass over all rows leaves."""
    if DIVIDE not in cache.can:
        with pytest.raises(UnsupportedError, match="can't divide rows"):
            cache.divide(2, 1)
        return
    whole = type(cache)(DynamicCache(), DynamicCache()) if isinstance(cache, EncoderDecoderCache) else DynamicCache()
    rows, longest = len(lengths), max(lengths)
    for one in (cache, whole):
        torch.manual_seed(0)
        one.begin(rows, longest, lengths)
        for layer in range(LAYERS):
            one.write(layer, torch.randn(rows, longest, 2, HEADS, WIDTH))
        one.end()
    for num_new in (1, 280):  # the second makes a cache that grows grow
        new = torch.randn(LAYERS, rows, num_new, 2, HEADS, WIDTH)
        whole.begin(rows, num_new)
        read = [whole.write(layer, new[layer]) for layer in range(LAYERS)]
        whole.end()
        parts = cache.divide(2, num_new)
        for first, part in enumerate(parts):
            span = part.begin(rows // 2, num_new)
            for layer in range(LAYERS):
                mine = part.write(layer, new[layer, first::2])
                for found, expected in zip(mine, read[layer], strict=True):
                    for row, start in enumerate(span.starts):
                        stop = start + num_new
                        assert torch.equal(found[row, :, :stop], expected[first + 2 * row, :, :stop])
            part.end()
        cache.rejoin(parts)
        assert cache.lengths == whole.lengths
        assert cache.get_seq_length() == whole.get_seq_length()


# --- memory, copies, files -----------------------------------------------------------------------------------


def test_bytes_are_those_of_the_memory(cache: Cache) -> None:
    plain = Plain(cache, [[], []])
    plain.read(20)
    each = 2 * HEADS * WIDTH * 4
    places = {
        "SlidingWindowCache": MOST_ROWS * 2 * WINDOW,
        "HybridCache": MOST_ROWS * (WINDOW + ROOM),
        "SinkCache": 2 * 2 * (WINDOW + NUM_SINKS),
        "StaticCache": MOST_ROWS * 2 * ROOM,
        "OffloadedStaticCache": MOST_ROWS * 2 * ROOM,
    }
    # Packed: a code, a scale and a zero point for every number. Beside them slots for what is recent, a step and a
    # trial; a packed window has room for what it sees and for a trial.
    packed, recent = 2 * HEADS * WIDTH * (1 + 4 + 4), (RESIDUAL + 1) * each
    window, whole = WINDOW - RESIDUAL + 1 + 64 + 1, ROOM - RESIDUAL
    bytes_packed = {
        "QuantizedCache": 2 * 2 * (256 * packed + recent + 16 * each),
        "QuantizedStaticCache": MOST_ROWS * 2 * (whole * packed + recent + 64 * each),
        "QuantizedHybridCache": MOST_ROWS
        * sum((whole if seen is None else window) * packed + recent + 64 * each for seen in find_windows(cache)),
    }
    own = getattr(cache, "self_attention_cache", cache)
    name = type(own).__name__
    if isinstance(own, PagedCache):
        assert cache.nbytes == 2 * sum(count_block_bytes(own, 20, seen) for seen in find_windows(cache))
        for _ in range(30):
            plain.read(1)
        assert cache.nbytes == 2 * sum(count_block_bytes(own, 50, seen) for seen in find_windows(cache))
        return
    assert cache.nbytes == (bytes_packed[name] if name in bytes_packed else places.get(name, 2 * 2 * 64) * each)
    before = cache.nbytes
    for _ in range(30):
        plain.read(1)
    assert cache.nbytes == before


def count_block_bytes(cache: PagedCache, length: int, window: int | None) -> int:
    """Whole blocks, as many as a row needs in one layer: those in view, and packed ones with scales and zero points."""
    size, each = cache.pool.block_size, 2 * HEADS * WIDTH
    gone = max(0, length - window) // size * size if window is not None else 0
    packed = max(0, length - RESIDUAL) // size * size if cache.cache_config is not None else 0
    return (-(-length // size) * size - gone - packed) * each * 4 + packed * each * (1 + 4 + 4)


def test_a_clone_goes_its_own_way(cache: Cache) -> None:
    plain = Plain(cache, [[], []])
    plain.read(11, [11, 4])
    other = Plain(cache.clone(), [list(row) for row in plain.rows], plain.written)
    plain.read(2)
    other.read(3, [1, 3])
    other.select([1, 1])
    other.read(1)
    plain.read(9)
    other.read(9)


# --- rows join and leave ------------------------------------------------------------------------------------


def join(plain: Plain, other: Plain) -> None:
    plain.cache.join(other.cache)
    plain.rows = [*plain.rows, *map(list, other.rows)]
    plain.written = max(plain.written, other.written)
    assert plain.cache.lengths == [len(row) for row in plain.rows]


def take(plain: Plain, index: list[int]) -> Plain:
    return Plain(plain.cache.take_rows(index), [list(plain.rows[row]) for row in index], plain.written + 1000)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_joined_midway_hold_what_they_held_alone(kind: str) -> None:
    plain = Plain(KINDS[kind](), [[], []])
    plain.read(11, [11, 4])
    newcomer = Plain(KINDS[kind](), [[], []], written=3000)
    newcomer.read(9, [3, 9])
    newcomer.read(1)
    plain.read(1)
    join(plain, newcomer)
    plain.read(1)
    newcomer.read(2)  # it goes its own way
    plain.read(3, [3, 1, 2, 0])
    left = take(plain, [3, 0])
    plain.select([1, 2])
    left.read(8, [8, 2])
    plain.read(1)
    join(left, plain)
    left.read(1)
    left.select([2, 1])
    left.read(20, [20, 7])


@pytest.mark.parametrize("kind", KINDS)
def test_rows_join_a_batch_that_all_have_left(kind: str) -> None:
    plain, newcomer = Plain(KINDS[kind](), []), Plain(KINDS[kind](), [[], []])
    newcomer.read(12, [12, 5])
    join(plain, newcomer)  # nothing was ever written here
    plain.read(1)
    plain.select([])
    assert plain.cache.lengths == []
    join(plain, newcomer)
    join(plain, take(newcomer, [1]))
    plain.read(1)
    plain.read(4, [4, 2, 3])


def test_what_can_not_join() -> None:
    with pytest.raises(SettingError, match="rows of a StaticCache can't join those of a DynamicCache"):
        KINDS["dynamic"]().join(KINDS["static"]())
    full = Plain(KINDS["static"](), [[]] * MOST_ROWS)
    full.read(2)
    with pytest.raises(SettingError, match=f"{MOST_ROWS + 1} rows do not fit"):
        full.cache.join(full.cache.take_rows([0]))
    full.read(1)
    for kind in ("sliding", "quantized", "sink"):
        plain = Plain(KINDS[kind](), [[]])
        plain.read(2)
        plain.cache.begin_trial()
        with pytest.raises(SettingError, match="can't join while tokens are tried"):
            plain.cache.join(plain.cache.clone())
    few = PagedCache(block_size=16, num_blocks=3)
    Plain(few, [[]]).read(20)
    other = PagedCache(block_size=16)
    Plain(other, [[], []]).read(17)
    before = few.pool.num_free
    with pytest.raises(ResourceError, match="3 are missing"):
        few.join(other)
    assert (few.lengths, few.pool.num_free) == ([20], before)


def test_rows_over_one_pool_join_without_a_copy() -> None:
    pool = BlockPool(16)
    plain, other = Plain(PagedCache(pool), [[]]), Plain(PagedCache(pool), [[], []], written=3000)
    plain.read(40)
    other.read(33, [33, 20])
    used = pool.num_blocks - pool.num_free
    join(plain, other)
    assert pool.num_blocks - pool.num_free == used
    del other
    plain.read(1)
    plain.select([1, 2])
    plain.read(3)
    plain.select([])
    assert pool.num_free == pool.num_blocks


@pytest.mark.parametrize("lengths", [[11, 4], [30, 1], [5, 5]])
def test_saved_and_loaded(cache: Cache, lengths: list[int], tmp_path: Path) -> None:
    plain = Plain(cache, [[], []])
    plain.read(max(lengths), lengths)
    cache.save(tmp_path / "cache.safetensors")
    loaded = Cache.load(tmp_path / "cache.safetensors")
    assert type(loaded) is type(cache) and loaded.lengths == lengths
    assert (loaded.room, loaded.get_max_cache_shape()) == (cache.room, cache.get_max_cache_shape())
    loaded.attach(NoTurns())
    other = Plain(loaded, [list(row) for row in plain.rows], plain.written)
    other.read(1)
    other.select([1, 0])
    other.read(8, [2, 8])
    other.read(1)


def test_files_that_are_no_caches(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    path = tmp_path / "file"
    with pytest.raises(LoadError, match="there is no file"):
        Cache.load(path)
    path.write_bytes(b"\x00" * 40)
    with pytest.raises(LoadError, match="safetensors"):
        Cache.load(path)
    save_file({"x": torch.zeros(2)}, path)
    with pytest.raises(LoadError, match="no saved cache"):
        Cache.load(path)
    good = {"format": "unspool cache 1", "lengths": "[3]", "facts": "{}", "notes": "{}"}
    tensors = {"layer.0": torch.zeros(1, 3, 2, HEADS, WIDTH)}
    save_file(tensors, path, {**good, "kind": "DynamicCache"})
    assert Cache.load(path).lengths == [3]
    for change in (
        {"lengths": "[4]"},
        {"lengths": "[-3]"},
        {"lengths": "3"},
        {"lengths": "["},
        {"kind": "StaticCache"},
        {"kind": "StaticCache", "facts": '{"rows": 1e30, "capacity": 3, "heads": 2, "width": 3}'},
        {"kind": "OffloadedStaticCache", "facts": '{"rows": 1, "capacity": 3, "heads": 2, "width": -3}'},
        {"kind": "StaticCache", "facts": '{"rows": 1, "capacity": 3, "heads": -2, "width": -3}'},
        {"kind": "HybridCache", "facts": "[]"},
        {"kind": "SinkCache", "facts": '{"window_length": -1, "num_sink_tokens": 0}'},
        {"kind": "EncoderDecoderCache", "facts": '{"kinds": ["EncoderDecoderCache", "DynamicCache"]}'},
        {"kind": "PickleCache"},
    ):
        save_file(tensors, path, {**good, "kind": "DynamicCache", **change})
        with pytest.raises(LoadError, match=r"damaged|can't read"):
            Cache.load(path)


def test_offloaded_keys_leave_no_file_and_need_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno

    cache = OffloadedCache(folder=tmp_path)
    Plain(cache, [[], []]).read(300)
    assert list(tmp_path.iterdir()) == []

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("unspool.cache.offload.memory._reserve", refuse)
    with pytest.raises(ResourceError, match=r"MiB more in .* name another folder"):
        Plain(OffloadedCache(folder=tmp_path), [[]]).read(3)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ResourceError, match="can't be offloaded to"):
        Plain(OffloadedCache(folder=tmp_path / "nowhere"), [[]]).read(3)
