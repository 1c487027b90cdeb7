"""One suite for every kind of cache: what is written is read back at its position, row by row."""

from __future__ import annotations

from operator import is_
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.cache.plain_cache import (
    HEADS,
    KINDS,
    LAYERS,
    MOST_ROWS,
    ROOM,
    SIZES,
    WIDTH,
    Plain,
    fill,
)

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
    Cache,
    DynamicCache,
    EncoderDecoderCache,
    PagedCache,
    StaticCache,
)
from unspool.errors import SettingError, UnspoolError, UnsupportedError
from unspool.kernels.ragged import Ragged

# --- what is written is read back --------------------------------------------------------------------------


@pytest.mark.parametrize("counts", [None, [4, 4, 4], [1, 4, 2], [4, 0, 3]])
def test_prompts_and_steps_are_read_back(cache: Cache, counts: list[int] | None) -> None:
    plain = Plain(cache, [[], [], []])
    plain.read(4, counts)
    for _ in range(3):
        plain.read(1)
    plain.read(3, [3, 1, 2])
    plain.read(1)


def test_places_to_look_at_are_there_where_places_to_read_by_are(cache: Cache) -> None:
    """Whoever asks whether a pass can go by address looks at these: a kind that has none must not seem to have some."""
    plain = Plain(cache, [[], []])
    for num_new in (3, 1):
        plain.read(num_new)
        looked_at, places = cache.last_places(), cache.places()
        assert (looked_at is None) == (places is None)
        assert looked_at is None or places is None or all(map(is_, looked_at.buffers, places.buffers))


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
            cache.write_flat(0, torch.zeros(1, 2, HEADS, WIDTH), None)  # never looked at
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
@settings(max_examples=12)  # for each of twenty kinds
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
