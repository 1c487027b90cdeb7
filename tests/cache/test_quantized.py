"""Quantised caches: bounded error after any history, exact while nothing is packed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.cache.small_packing import BLOCK, HEADS, LAYERS, RESIDUAL, SIZES, SMALL, WIDTH, configure

from unspool.cache import (
    FIXED_SHAPE,
    ROLL_BACK,
    TRIAL,
    Cache,
    DynamicCache,
    HQQQuantizedCache,
    QuantizedCache,
    QuantizedCacheConfig,
    QuantizedStaticCache,
    QuantoQuantizedCache,
)
from unspool.errors import LoadError, SettingError
from unspool.kernels.packed_keys import PackedKeys

KINDS: dict[str, Callable[[int], QuantizedCache]] = {
    "own": lambda nbits: QuantizedCache(configure(nbits=nbits)),
    "by token": lambda nbits: QuantizedCache(QuantizedCacheConfig("unspool", axis_key=1, **{**SMALL, "nbits": nbits})),
    "HQQ": lambda nbits: HQQQuantizedCache(configure("HQQ", nbits=nbits)),
    "quanto": lambda nbits: QuantoQuantizedCache(configure("quanto", nbits=min(nbits, 4))),
    "static": lambda nbits: QuantizedStaticCache(configure(nbits=nbits), SIZES, 6, 120),
}


@dataclass
class Exact:
    """What every row was given, beside the cache that packs it. Numbers lie between 0 and 1, so steps are known."""

    cache: QuantizedCache
    rows: list[torch.Tensor]  # (positions, layers, 2, heads, width) each
    rng: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))
    num_rollbacks: int = 0

    @classmethod
    def over(cls, cache: QuantizedCache, rows: int) -> Exact:
        return cls(cache, [torch.zeros(0, LAYERS, 2, HEADS, WIDTH) for _ in range(rows)])

    @property
    def bound(self) -> float:
        """Half a step of the widest range, once more for every time that packed positions were unpacked to stay."""
        return (0.5 + 1e-2) / (2**self.cache.nbits - 1) * (1 + self.num_rollbacks) + 1e-3

    def read(self, num_new: int, counts: list[int] | None = None, *, ends: bool = True) -> None:
        rows = len(self.rows)
        real = counts or [num_new] * rows
        new = torch.rand(rows, num_new, LAYERS, 2, HEADS, WIDTH, generator=self.rng)
        span = self.cache.begin(rows, num_new, counts)
        held = [torch.cat((row, new[i, :count])) for i, (row, count) in enumerate(zip(self.rows, real, strict=True))]
        for layer in range(LAYERS):
            both = self.cache.write(layer, new[:, :, layer].clone())
            self.check(both, held, layer, span.stop)
        if ends:
            self.cache.end()
            self.rows = held
            assert self.cache.lengths == [len(row) for row in self.rows]
            self.check_held()

    def check(self, both: tuple[Any, Any], held: list[torch.Tensor], layer: int, stop: int) -> None:
        for which, found in enumerate(both):
            whole = found.unpack(stop) if isinstance(found, PackedKeys) else found
            assert whole.shape == (len(held), HEADS, stop, WIDTH)
            for row, expected in enumerate(held):
                wanted = expected[:, layer, which].transpose(0, 1)
                torch.testing.assert_close(whole[row, :, : len(expected)], wanted, atol=self.bound, rtol=0)

    def check_held(self) -> None:
        longest = max(self.cache.lengths, default=0)
        for layer, both in enumerate(self.cache):
            self.check(both, self.rows, layer, longest)

    def truncate(self, lengths: list[int]) -> None:
        self.cache.truncate(lengths)
        self.rows = [row[:length] for row, length in zip(self.rows, lengths, strict=True)]
        self.num_rollbacks += 1
        self.check_held()

    def select(self, index: list[int]) -> None:
        self.cache.select_rows(index)
        self.rows = [self.rows[i] for i in index]
        self.check_held()


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[str, Any]]:
    """Passes, rows rolled back into packed blocks, rows that leave, come twice or change places."""
    rows = draw(st.integers(1, 3))
    lengths, done = [0] * rows, [("rows", rows)]
    for turn in range(draw(st.integers(2, 8))):
        what = draw(st.sampled_from(["read", "step", "step", "truncate", "select", "fail"])) if turn else "read"
        if what in ("read", "fail"):
            num_new = draw(st.integers(1, 14))
            counts = draw(st.lists(st.integers(0, num_new), min_size=rows, max_size=rows))
            done.append((what, (num_new, counts)))
            if what == "read":
                lengths = [length + count for length, count in zip(lengths, counts, strict=True)]
        elif what == "step":
            done.append(("read", (1, None)))
            lengths = [length + 1 for length in lengths]
        elif what == "truncate":
            lengths = [draw(st.integers(0, length)) for length in lengths]
            done.append(("truncate", list(lengths)))
        else:
            index = draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=4))
            rows, lengths = len(index), [lengths[i] for i in index]
            done.append(("select", index))
    return done


@pytest.mark.parametrize("nbits", [8, 4, 2])
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=12)  # for each of fifteen
@given(history=histories())
def test_any_history_is_read_back_within_the_bound(kind: str, nbits: int, history: list[tuple[str, Any]]) -> None:
    (_, rows), *rest = history
    exact = Exact.over(KINDS[kind](nbits), rows)
    for what, value in rest:
        if what == "read":
            exact.read(*value)
        elif what == "fail":  # a pass that breaks off leaves the cache as it was
            exact.read(*value, ends=False)
            exact.check_held()
        else:
            getattr(exact, what)(value)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_recent_is_exact(kind: str) -> None:
    cache = KINDS[kind](2)
    exact = Exact.over(cache, 2)
    exact.read(21, [21, 14])
    for _ in range(9):
        exact.read(1)
        for row, length in enumerate(cache.lengths):
            packed = cache._store.layers[0].num_packed[row]
            assert packed == (length - RESIDUAL) // BLOCK * BLOCK  # whole blocks, as soon as enough comes after them
            for layer, (keys, values) in enumerate(cache):
                for which, found in enumerate((keys, values)):
                    wanted = exact.rows[row][packed:, layer, which].transpose(0, 1)
                    assert torch.equal(found[row, :, packed:length], wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_packed_during_a_trial(kind: str) -> None:
    cache = KINDS[kind](2)
    exact = Exact.over(cache, 2)
    exact.read(11, [11, 6])
    before = list(cache._store.layers[0].num_packed)
    drafted = exact.rows
    cache.begin_trial()
    exact.read(9)
    exact.read(2)
    assert cache._store.layers[0].num_packed == before == [8, 0]
    exact.truncate([12, 8])
    assert cache._store.layers[0].num_packed == [8, 4]  # what was due is packed when the trial ends
    exact.num_rollbacks = 0
    exact.check_held()  # nothing was unpacked to roll back
    assert all(torch.equal(now[: len(then)], then) for now, then in zip(exact.rows, drafted, strict=True))
    exact.read(9)
    assert cache._store.layers[0].num_packed == [16, 12]


def test_a_static_cache_has_little_room_for_a_trial() -> None:
    cache = KINDS["static"](4)
    Exact.over(cache, 1).read(4)
    cache.begin_trial()
    with pytest.raises(SettingError, match="draft fewer tokens"):
        cache.begin(1, 100)


def test_a_trial_takes_room_by_row() -> None:
    """A short row beside a long one needs no more slots than it fills."""
    cache = KINDS["static"](4)
    exact = Exact.over(cache, 2)
    exact.read(100, [100, 3])
    cache.begin_trial()
    exact.read(5)
    exact.truncate([102, 8])
    exact.num_rollbacks = 0
    exact.read(1)


def test_static_buffers_never_move() -> None:
    cache = KINDS["static"](4)
    places = [tensor.data_ptr() for store in cache._store.layers for tensor in store.tensors()]
    size = cache.nbytes
    exact = Exact.over(cache, 3)
    exact.read(30, [30, 5, 17])
    for _ in range(12):
        exact.read(1)
    exact.select([2, 0, 0, 1])
    exact.truncate([7, 20, 3, 6])
    exact.read(3)
    assert [tensor.data_ptr() for store in cache._store.layers for tensor in store.tensors()] == places
    assert cache.nbytes == size
    with pytest.raises(SettingError, match="position 121 does not fit"):
        cache.begin(4, 121 - max(cache.lengths))
    with pytest.raises(SettingError, match="7 rows do not fit"):
        cache.select_rows([0] * 7)
    cache.reset()
    Exact.over(cache, 2).read(9)


def test_capabilities() -> None:
    assert {ROLL_BACK, TRIAL} <= KINDS["own"](4).can
    assert FIXED_SHAPE not in KINDS["own"](4).can
    assert FIXED_SHAPE in KINDS["static"](4).can
    assert [KINDS[kind](4).is_compileable for kind in ("own", "static")] == [False, True]


@pytest.mark.parametrize("nbits", [2, 4, 8])
def test_memory(nbits: int) -> None:
    """Codes, a scale and a zero point for every 64 numbers; the recent positions; at most a chunk of room ahead."""
    heads, width, length = 2, 64, 4096
    cache = QuantizedCache(QuantizedCacheConfig("HQQ", nbits=nbits, axis_value=1))
    cache.update(*torch.rand(2, 1, heads, length, width, dtype=torch.bfloat16), 0)
    packed = (length - 128 + 256) * heads * width * 2 * (nbits / 8 + 2 * 2 / 64)
    recent = (128 + 64 + 16) * heads * width * 2 * 2
    assert cache.nbytes <= packed + recent


@pytest.mark.parametrize("kind", KINDS)
def test_saved_and_cloned_caches_go_on(kind: str, tmp_path: Any) -> None:
    exact = Exact.over(KINDS[kind](8), 3)
    exact.read(19, [19, 4, 11])
    exact.read(1)
    exact.cache.save(tmp_path / "cache.safetensors")
    loaded = Cache.load(tmp_path / "cache.safetensors")
    assert type(loaded) is type(exact.cache) and isinstance(loaded, QuantizedCache)
    assert loaded.nbytes == exact.cache.nbytes and loaded.cache_config == exact.cache.cache_config
    for other in (loaded, exact.cache.clone()):
        follower = Exact(other, list(exact.rows))
        follower.check_held()
        follower.read(6)
        follower.truncate([9, 2, 5])
    exact.check_held()  # what others did changed nothing here


@pytest.mark.parametrize("change", ["num_packed", "missing", "shape"])
def test_a_damaged_file_is_refused(change: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    exact = Exact.over(KINDS["own"](8), 1)
    exact.read(19)
    real = QuantizedCache._pack

    def damage(cache: QuantizedCache) -> Any:
        facts, tensors = real(cache)
        if change == "num_packed":
            facts["num_packed"] = [[4000], [4000]]
        elif change == "missing":
            del tensors["1.2"]
        else:
            tensors["1.0"] = tensors["1.0"][:, :1]
        return facts, tensors

    monkeypatch.setattr(QuantizedCache, "_pack", damage)
    exact.cache.save(tmp_path / "cache.safetensors")
    with pytest.raises(LoadError, match="damaged"):
        Cache.load(tmp_path / "cache.safetensors")


# --- the reference's surface --------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [QuantizedCache, QuantoQuantizedCache, HQQQuantizedCache])
def test_update_returns_everything_unpacked(make: type[QuantizedCache]) -> None:
    torch.manual_seed(0)
    cache, plain = make(QuantizedCacheConfig("quanto", q_group_size=8, residual_length=4)), DynamicCache()
    for num_new in (30, 1, 1, 5, 1):
        for layer in range(2):
            keys, values = torch.rand(2, 3, 2, num_new, 16)
            mine, theirs = cache.update(keys, values, layer), plain.update(keys, values, layer)
            for found, exact in zip(mine, theirs, strict=True):
                assert found.shape == exact.shape
                assert torch.equal(found[:, :, -num_new:], exact[:, :, -num_new:])  # a pass sees itself as it is
                torch.testing.assert_close(found, exact, atol=0.5 / 15 * 1.1, rtol=0)
        assert cache.get_seq_length() == cache.get_seq_length(1) == plain.get_seq_length()
    cache.reorder_cache(torch.tensor([2, 0, 1]))
    plain.reorder_cache(torch.tensor([2, 0, 1]))
    cache.crop(-3)
    plain.crop(-3)
    for mine, theirs in zip(cache.to_legacy_cache(), plain.to_legacy_cache(), strict=True):
        for found, exact in zip(mine, theirs, strict=True):
            torch.testing.assert_close(found, exact, atol=0.5 / 15 * 1.1, rtol=0)
    assert cache.get_max_cache_shape() is None
    assert len(cache.key_cache) == len(cache) == 2


def test_batches_are_split_and_joined() -> None:
    exact = Exact.over(KINDS["own"](8), 3)
    exact.read(13, [13, 2, 9])
    cache = exact.cache
    parts = cache.batch_split(3, 2)
    assert [part.lengths for part in parts] == [[13, 2], [9]]
    Exact(parts[1], [exact.rows[2]]).read(1)  # a part goes on alone
    exact.check_held()  # and the whole knows nothing of it
    parts[1].crop(9)
    whole = QuantizedCache.from_batch_splits(parts)
    Exact(whole, list(exact.rows)).read(2)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([4, 0]))
    Exact(cache, [exact.rows[2], exact.rows[0]]).read(1)


def test_legacy_tuples_are_packed() -> None:
    layers = tuple(tuple(torch.rand(2, 1, 2, 300, 16)) for _ in range(2))
    for make in (QuantizedCache, QuantoQuantizedCache, HQQQuantizedCache):
        cache = make.from_legacy_cache(layers)
        assert cache.lengths == [300] and cache._store.layers[0].num_packed == [128]
        for mine, theirs in zip(cache.to_legacy_cache(), layers, strict=True):
            torch.testing.assert_close(mine[0], theirs[0], atol=0.5 / 15 * 1.1, rtol=0)
