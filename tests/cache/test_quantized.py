"""Quantised caches: bounded error after any history, exact while nothing is packed, clear errors before any pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conformance.cases import load_model

import unspool
from unspool.cache import (
    FIXED_SHAPE,
    ROLL_BACK,
    TRIAL,
    Cache,
    DynamicCache,
    HQQQuantizedCache,
    HybridCache,
    QuantizedCache,
    QuantizedCacheConfig,
    QuantizedHybridCache,
    QuantizedStaticCache,
    QuantoQuantizedCache,
)
from unspool.errors import LoadError, SettingError, UnspoolError
from unspool.kernels.packed import PackedKeys

LAYERS, HEADS, WIDTH, BLOCK, RESIDUAL = 2, 2, 3, 4, 3
SMALL = {"nbits": 8, "q_group_size": BLOCK, "residual_length": RESIDUAL}
SIZES = SimpleNamespace(num_attention_heads=HEADS, hidden_size=HEADS * WIDTH, num_hidden_layers=LAYERS)


def configure(backend: str = "unspool", **more: Any) -> QuantizedCacheConfig:
    axes = {"unspool": (0, 1), "quanto": (-1, 0), "HQQ": (0, 1)}[backend]
    return QuantizedCacheConfig(backend, axis_key=axes[0], axis_value=axes[1], **{**SMALL, **more})


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
@settings(max_examples=20, deadline=None)
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
            packed = cache._stores[0].num_packed[row]
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
    before = list(cache._stores[0].num_packed)
    drafted = exact.rows
    cache.begin_trial()
    exact.read(9)
    exact.read(2)
    assert cache._stores[0].num_packed == before == [8, 0]
    exact.truncate([12, 8])
    assert cache._stores[0].num_packed == [8, 4]  # what was due is packed when the trial ends
    exact.num_rollbacks = 0
    exact.check_held()  # nothing was unpacked to roll back
    assert all(torch.equal(now[: len(then)], then) for now, then in zip(exact.rows, drafted, strict=True))
    exact.read(9)
    assert cache._stores[0].num_packed == [16, 12]


WINDOW = 10
SLIDING = SimpleNamespace(
    **vars(SIZES),
    sliding_window=WINDOW,
    layer_types=["sliding_attention", "full_attention"],
)


@pytest.mark.parametrize("residual_length", [0, 2 * WINDOW])
@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_windows_hold_what_whole_layers_hold(residual_length: int, data: st.DataObject) -> None:
    """Whatever slid away, a query sees the numbers that it would see in a cache that lets nothing go, bit by bit."""
    config = configure(nbits=4, residual_length=residual_length)
    whole, near = QuantizedCache(config), QuantizedHybridCache(config, SLIDING, 4, 400)
    rng = torch.Generator().manual_seed(1)
    rows = data.draw(st.integers(1, 3))
    for _ in range(data.draw(st.integers(4, 14))):
        what = (
            data.draw(st.sampled_from(["read", "steps", "steps", "try", "back", "select"])) if near.lengths else "read"
        )
        if what == "select":
            index = data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=4))
            whole.select_rows(index), near.select_rows(index)
            rows = len(index)
        elif what == "back":  # one position is always free
            lengths = [max(0, length - data.draw(st.integers(0, 1))) for length in near.lengths]
            whole.truncate(lengths), near.truncate(lengths)
        else:
            before = list(near.lengths)
            num_new = data.draw(st.integers(1, {"read": 30, "steps": 1, "try": 9}[what]))
            if what == "try":
                whole.begin_trial(), near.begin_trial()
            for _ in range(12 if what == "steps" else 1):
                compare_pass(whole, near, torch.rand(rows, num_new, 2, HEADS, WIDTH, generator=rng), WINDOW)
            if what == "try":
                kept = [length + data.draw(st.integers(0, num_new)) for length in before]
                whole.truncate(kept), near.truncate(kept)
    assert near.lengths == whole.lengths


def compare_pass(whole: QuantizedCache, near: QuantizedHybridCache, new: torch.Tensor, window: int) -> None:
    """One pass over both; the sliding layer's visible keys and values are those of the whole one."""
    rows, num_new = new.shape[:2]
    span = near.begin(rows, num_new)
    whole.begin(rows, num_new)
    mask = near.mask(span, window)
    places = near.key_positions(span, window).expand(rows, -1)
    for layer in range(LAYERS):
        mine, theirs = near.write(layer, new.clone()), whole.write(layer, new.clone())
        for found, expected in zip(mine, theirs, strict=True):
            kept = places.shape[1] if layer == 0 else span.stop
            found = found.unpack(kept) if isinstance(found, PackedKeys) else found
            expected = expected.unpack(span.stop) if isinstance(expected, PackedKeys) else expected
            for row in range(rows):
                for query in range(num_new):
                    position = span.starts[row] + query
                    if layer == 1:
                        assert torch.equal(found[row, :, : position + 1], expected[row, :, : position + 1])
                        continue
                    visible = (places[row] <= position) & (places[row] > position - window)
                    if isinstance(mask, torch.Tensor):
                        assert torch.equal(mask.expand(rows, 1, num_new, kept)[row, 0, query], visible)
                    wanted = expected[row, :, max(0, position + 1 - window) : position + 1]
                    assert torch.equal(found[row][:, visible], wanted)
    near.end()
    whole.end()


def test_packed_windows_are_small() -> None:
    """Layers as Gemma 2's, at 8k: a third of what plain rings and layers take."""
    sizes = SimpleNamespace(
        num_attention_heads=1, head_dim=64, num_hidden_layers=2, sliding_window=4096, layer_types=SLIDING.layer_types
    )
    plain = HybridCache(sizes, 1, 8192, dtype=torch.bfloat16)
    packed = QuantizedHybridCache(QuantizedCacheConfig("unspool", axis_value=1), sizes, 1, 8192, dtype=torch.bfloat16)
    assert packed.nbytes < 0.35 * plain.nbytes


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
    places = [tensor.data_ptr() for store in cache._stores for tensor in store.tensors()]
    size = cache.nbytes
    exact = Exact.over(cache, 3)
    exact.read(30, [30, 5, 17])
    for _ in range(12):
        exact.read(1)
    exact.select([2, 0, 0, 1])
    exact.truncate([7, 20, 3, 6])
    exact.read(3)
    assert [tensor.data_ptr() for store in cache._stores for tensor in store.tensors()] == places
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
        assert cache.lengths == [300] and cache._stores[0].num_packed == [128]
        for mine, theirs in zip(cache.to_legacy_cache(), layers, strict=True):
            torch.testing.assert_close(mine[0], theirs[0], atol=0.5 / 15 * 1.1, rtol=0)


def test_config_round_trip(tmp_path: Any) -> None:
    config = QuantizedCacheConfig("HQQ", nbits=8, axis_value=1, compute_dtype=torch.bfloat16)
    assert QuantizedCacheConfig.from_dict(config.to_dict()) == config
    assert config.update(nbits=2, colour="red") == {"colour": "red"} and config.nbits == 2
    config.to_json_file(tmp_path / "c.json")
    assert '"compute_dtype": "torch.bfloat16"' in (tmp_path / "c.json").read_text()
    assert QuantizedCacheConfig(compute_dtype="torch.bfloat16").compute_dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"nbits": 3}, "`nbits`=3 can't be packed"),
        ({"nbits": 8, "backend": "quanto"}, "optimum-quanto.*takes 2 or 4; backend='unspool' packs 8"),
        ({"nbits": 1, "backend": "HQQ"}, "hqq.*takes 2 or 4 or 8"),
        ({"nbits": True}, "`nbits`=True"),
        ({"axis_key": -1, "backend": "HQQ"}, "`axis_key`=-1 is no axis of backend='HQQ', which takes 0 or 1"),
        ({"axis_value": 1, "backend": "quanto"}, "`axis_value`=1 is no axis"),
        ({"axis_key": 2}, "`axis_key`=2"),
        ({"backend": "bits"}, "`backend`='bits' is none of 'unspool', 'quanto', 'HQQ'"),
        ({"backend": 4}, "`backend`=4"),
        ({"q_group_size": 0}, "`q_group_size` must be a whole number from 1"),
        ({"q_group_size": 10**9}, "`q_group_size`"),
        ({"residual_length": -1}, "`residual_length`"),
        ({"residual_length": 1.5}, "`residual_length`"),
        ({"residual_length": float("nan")}, "`residual_length`"),
        ({"compute_dtype": "int8"}, "`compute_dtype` must be one of float16"),
        ({"device": "toaster"}, "`device`='toaster' is no device"),
        ({"group_size": 64}, "'group_size'.*did you mean 'q_group_size'"),
    ],
)
@pytest.mark.parametrize("kind", ["quantized", "quantized_static", "quantized_hybrid", "offloaded_quantized_hybrid"])
def test_bad_settings_are_refused_before_the_first_pass(
    kind: str, values: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model("llama").model
    monkeypatch.setattr(type(model), "forward", lambda *_, **__: pytest.fail("a pass was made"))
    with pytest.raises(UnspoolError, match=message):
        unspool.generate(
            model, torch.tensor([[5, 6]]), max_new_tokens=2, cache_implementation=kind, cache_config=values
        )


def test_a_cache_for_another_device_is_refused() -> None:
    cache = QuantizedCache(configure(device="meta"))
    cache.begin(1, 1)
    with pytest.raises(SettingError, match="made for device='meta' and the keys are on cpu"):
        cache.write(0, torch.zeros(1, 1, 2, HEADS, WIDTH))


def test_defaults_are_kivi() -> None:
    model = load_model("llama").model
    cache = model.new_cache("quantized", 1, 10)
    assert type(cache) is QuantizedCache
    keys, values = cache.cache_config.make_schemes(16)
    assert (keys.by_channel, values.by_channel, keys.nbits, keys.block) == (True, False, 4, 64)
    for backend, kind in (("quanto", QuantoQuantizedCache), ("HQQ", HQQQuantizedCache)):
        assert type(model.new_cache("quantized", config={"backend": backend})) is kind


# --- models -------------------------------------------------------------------------------------------------

FAMILIES = ["llama", "gpt2", "gemma2", "mistral", "bloom", "qwen3", "t5"]


def prompts(seed: int = 0) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 160, (3, 30), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    mask[1, :11] = 0
    mask[2, :4] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("kind", ["quantized", "quantized_static"])
@pytest.mark.parametrize("name", FAMILIES)
def test_while_nothing_is_packed_every_token_is_the_same(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores too, of every beam at every step.

    Sums over buffers of another shape are rounded otherwise, by some 1e-5. A bias that changes from step to step keeps
    that from deciding a tie: this GPT-2's two best tokens are 4e-6 apart at one step, and where this T5 says 99 for
    ever, "99 137" is worth -19.3207 after any number of 99. With the bias the best token always wins by more.
    """

    def vary(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + torch.randn(scores.shape[1], generator=torch.Generator().manual_seed(input_ids.shape[1]))

    model = load_model(name).model
    if hasattr(model, "_whole"):  # packed keys are read by torch's operators: compare with the same arithmetic
        monkeypatch.setattr(model, "_whole", None)
    common = {**prompts(), "max_new_tokens": 24, "return_dict_in_generate": True, "output_scores": True}
    for num_beams in (1, 3):
        more = {**common, "num_beams": num_beams, "logits_processor": [vary]}
        exact = unspool.generate(model, **more)
        packed = unspool.generate(model, **more, cache_implementation=kind)
        best = torch.stack([scores.topk(2).values for scores in exact.scores])
        assert (best[..., 0] - best[..., 1]).min() > 1e-4
        assert torch.equal(packed.sequences, exact.sequences)
        for mine, theirs in zip(packed.scores, exact.scores, strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["quantized", "quantized_static"])
@pytest.mark.parametrize("name", FAMILIES)
def test_eight_bits_stay_near_and_only_ties_change(name: str, kind: str) -> None:
    """Packed from the 8th position on: no logit is off by more than 6 % of their range.

    A token that changed changes those after it, so rows are compared up to their first difference from the exact
    row, and the tokens there must have been closer to a tie than what packing may shift.
    """
    model = load_model(name).model
    common = {**prompts(), "max_new_tokens": 30, "return_dict_in_generate": True, "output_logits": True}
    config = {"nbits": 8, "q_group_size": 8, "residual_length": 8}
    exact = unspool.generate(model, **common)
    packed = unspool.generate(model, **common, cache_implementation=kind, cache_config=config)
    start = exact.sequences.shape[1] - len(exact.logits)
    for row in range(3):
        for step, (mine, theirs) in enumerate(zip(packed.logits, exact.logits, strict=False)):
            off = (mine[row] - theirs[row]).abs().max()
            assert off < 0.06 * (theirs[row].max() - theirs[row].min())
            if packed.sequences[row, start + step] != exact.sequences[row, start + step]:
                top = theirs[row].topk(2).values
                assert top[0] - top[1] <= 2 * off
                break


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "t5"])  # its rows begin together
def test_rows_alone_are_rows_in_the_batch(name: str) -> None:
    model, inputs = load_model(name).model, prompts(1)
    settings_ = {
        "max_new_tokens": 20,
        "cache_implementation": "quantized",
        "cache_config": {"nbits": 4, "q_group_size": 8, "residual_length": 4},
    }
    together = unspool.generate(model, **inputs, **settings_)
    for row in range(3):
        ids = inputs["input_ids"][row][inputs["attention_mask"][row].bool()][None]
        alone = unspool.generate(model, ids, **settings_)
        new = alone.shape[1] - ids.shape[1]
        assert together[row, 30 : 30 + new].tolist() == alone[0, ids.shape[1] :].tolist()


def test_attentions_are_told_by_position() -> None:
    model, inputs = load_model("llama").model, prompts(2)
    common = {**inputs, "max_new_tokens": 6, "return_dict_in_generate": True, "output_attentions": True}
    config = {"nbits": 8, "q_group_size": 8, "residual_length": 4}
    exact = unspool.generate(model, **common)
    packed = unspool.generate(model, **common, cache_implementation="quantized", cache_config=config)
    for mine, theirs in zip(packed.attentions[1], exact.attentions[1], strict=True):
        assert mine.shape == theirs.shape
        torch.testing.assert_close(mine, theirs, atol=0.05, rtol=0)


@pytest.mark.parametrize("make", [QuantizedCache, QuantoQuantizedCache, HQQQuantizedCache])
def test_a_cache_in_a_model_call_and_in_generate(make: type[QuantizedCache]) -> None:
    model = load_model("llama").model
    ids = torch.randint(3, 160, (2, 40), generator=torch.Generator().manual_seed(3))
    cache = make(QuantizedCacheConfig("quanto", q_group_size=8, residual_length=8))
    output = model(ids, past_key_values=cache, use_cache=True)
    assert output.past_key_values is cache and cache.lengths == [40, 40]
    assert cache._stores[0].num_packed == [32, 32]
    torch.testing.assert_close(output.logits, model(ids).logits)  # a prompt sees itself as it is
    more = torch.cat((ids, output.logits[:, -1].argmax(-1, keepdim=True)), dim=1)
    out = unspool.generate(model, more, past_key_values=cache, max_new_tokens=5)
    assert out.shape == (2, 46) and cache.lengths == [45, 45]


def test_a_cache_that_came_back_goes_on() -> None:
    """Two turns over one cache end where one long turn does."""
    model, config = load_model("llama").model, {"nbits": 4, "q_group_size": 8, "residual_length": 8}
    ids = torch.randint(3, 160, (1, 20), generator=torch.Generator().manual_seed(4))
    common = {"cache_implementation": "quantized", "cache_config": config, "return_dict_in_generate": True}
    whole = unspool.generate(model, ids, max_new_tokens=24, **common)
    first = unspool.generate(model, ids, max_new_tokens=10, **common)
    second = unspool.generate(model, first.sequences, past_key_values=first.past_key_values, max_new_tokens=14)
    assert second.tolist() == whole.sequences.tolist()


def test_perplexity_of_the_default_model(default_model_file: Any) -> None:
    """On 200 tokens of a fixed text, nearly all packed: less than 1 % more at 8 bits, less than 4 % at 4 bits."""
    from benchmarks.cache_quality import TEXT, measure

    lm = unspool.load(default_model_file, quantize=None)
    ids = torch.tensor([lm.tokenizer.encode(TEXT.read_text(encoding="utf-8"))[:200]])
    exact, _ = measure(lm.model, ids, 50, "dynamic", None)
    for nbits, most in ((8, 0.01), (4, 0.04)):
        config = {"nbits": nbits, "residual_length": 16, "q_group_size": 32}
        found, _ = measure(lm.model, ids, 50, "quantized", config)
        assert abs(found / exact - 1) < most
