"""Every kind of cache on real decoders, against no cache at all: past the window, ragged, for every way of decoding."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conformance.cases import Case, load_model, read_cases, run_case

import unspool
from unspool.cache import (
    KINDS,
    Cache,
    DynamicCache,
    HybridCache,
    OffloadedStaticCache,
    PagedCache,
    QuantizedHybridCache,
    SinkCache,
    SlidingWindowCache,
    StaticCache,
)
from unspool.cache.sink import BLOCK
from unspool.errors import InputError, NoTokenLeftError, SettingError, UnsupportedError
from unspool.protocols import Want

EXACT = {"llama": ("dynamic", "static", "paged", "offloaded", "offloaded_static", "hybrid", "offloaded_hybrid")}
EXACT["gemma2"] = EXACT["bloom"] = EXACT["gpt2"] = EXACT["llama"]
EXACT["mistral"] = (*EXACT["llama"], "sliding_window")
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "sampling": {"do_sample": True, "seed": 11, "num_return_sequences": 2},
    "chunks": {"prefill_chunk_size": 5},
}
NEW: dict[str, Any] = {"max_new_tokens": 14, "eos_token_id": None}


def make_inputs(model: Any, width: int = 22) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, model.info.vocab_size, (3, width), generator=torch.Generator().manual_seed(4))
    mask = torch.ones_like(ids)
    mask[0, :9], mask[1, : width - 3] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


@lru_cache
def decode_without_a_cache(name: str, way: str) -> torch.Tensor:
    model = load_model(name).model
    plain = {key: value for key, value in WAYS[way].items() if key != "prefill_chunk_size"}
    return unspool.generate(model, **make_inputs(model), **NEW, **plain, use_cache=False)


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name, kinds in EXACT.items() for kind in kinds])
@pytest.mark.parametrize("way", WAYS)
def test_exact_kinds_decode_as_without_a_cache(name: str, kind: str, way: str) -> None:
    model = load_model(name).model
    found = unspool.generate(model, **make_inputs(model), **NEW, **WAYS[way], cache_implementation=kind)
    assert torch.equal(found, decode_without_a_cache(name, way))


SINKS = [(54, 4), (64, 0), (80, 40)]  # lengths of windows that the texts don't outgrow


@pytest.mark.parametrize("name", ["gemma2", "mistral"])
@pytest.mark.parametrize("way", [*WAYS, "drafts"])
@pytest.mark.parametrize("width", [11, 40])
def test_below_its_length_a_sink_cache_changes_nothing(name: str, way: str, width: int) -> None:
    """Layers with windows of their own (8 positions) see as far back as they ever do, and sinks no farther."""
    model = load_model(name).model
    settings = {"prompt_lookup_num_tokens": 3} if way == "drafts" else WAYS[way]
    inputs = make_inputs(model, width)
    expected = unspool.generate(model, **inputs, **NEW, **settings)
    for length, num_sinks in SINKS:
        told = {"window_length": length, "num_sink_tokens": num_sinks}
        found = unspool.generate(model, **inputs, **NEW, **settings, cache_implementation="sink", cache_config=told)
        assert torch.equal(found, expected), (length, num_sinks)


@pytest.mark.parametrize("chunk", [None, 5])
def test_sinks_that_no_window_reaches_are_not_seen(chunk: int | None) -> None:
    """All layers of this mistral see 8 positions: a sink cache of 24 that keeps 4 sinks has all that they see."""
    model = load_model("mistral").model
    inputs, more = make_inputs(model, 40), {"max_new_tokens": 60, "eos_token_id": None, "prefill_chunk_size": chunk}
    told = {"window_length": 24, "num_sink_tokens": 4}
    found = unspool.generate(model, **inputs, **more, cache_implementation="sink", cache_config=told)
    assert torch.equal(found, unspool.generate(model, **inputs, **more))


@pytest.mark.parametrize("name", ["gemma2", "mistral"])
@pytest.mark.parametrize("way", [*WAYS, "drafts"])
def test_packed_windows_decode_as_packed_layers(
    name: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a window let go no query sees, so it answers as if every position had been kept and packed alike."""
    monkeypatch.setattr("unspool.cache.stores.packed.TRIAL_ROOM", 16)  # little room, so that windows slide soon
    model = load_model(name).model
    settings = {"prompt_lookup_num_tokens": 3} if way == "drafts" else WAYS[way]
    common = {
        **make_inputs(model),
        "max_new_tokens": 48,
        "eos_token_id": None,
        **settings,
        "return_dict_in_generate": True,
    }
    told = {"nbits": 8, "q_group_size": 4, "residual_length": 4}
    expected = unspool.generate(model, **common, cache_implementation="quantized", cache_config=told)
    for kind, where in {"quantized_hybrid": {}, "offloaded_quantized_hybrid": {"folder": str(tmp_path)}}.items():
        found = unspool.generate(model, **common, cache_implementation=kind, cache_config={**told, **where})
        assert torch.equal(found.sequences, expected.sequences)
        cache = found.past_key_values
        assert isinstance(cache, QuantizedHybridCache) and list(tmp_path.iterdir()) == []
        assert any(cache._store.layers[0].bases)  # a window did slide


def test_files_for_packed_layers_must_be_there() -> None:
    model = load_model("gemma2").model
    with pytest.raises(SettingError, match="is no folder"):
        told = {"folder": "/nowhere/at/all"}
        unspool.generate(
            model, [[5]], max_new_tokens=2, cache_implementation="offloaded_quantized_hybrid", cache_config=told
        )
    with pytest.raises(SettingError, match=r"'quantized_hybrid' cache takes .*"):
        unspool.generate(
            model, [[5]], max_new_tokens=2, cache_implementation="quantized_hybrid", cache_config={"folder": "/tmp"}
        )
    with pytest.raises(UnsupportedError, match="has an encoder"):
        unspool.generate(load_model("t5").model, [[5]], max_new_tokens=2, cache_implementation="quantized_hybrid")


WINDOWED = [case for case in read_cases() if case.model in ("gemma2", "mistral") and case.to_come is None]


@pytest.mark.parametrize("case", WINDOWED, ids=str)
def test_goldens_hold_with_rings(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The references' tokens, with sliding and hybrid caches; prompts and answers outgrow the window of 8."""
    real = unspool.generate
    for kind in ("hybrid", "sliding_window") if case.model == "mistral" else ("hybrid",):
        with monkeypatch.context() as patch:
            patch.setattr(unspool, "generate", lambda *a, kind=kind, **k: real(*a, cache_implementation=kind, **k))
            output = run_case(case)
        if "sequences" in case.expected:
            assert output.sequences.tolist() == case.expected["sequences"]
        assert isinstance(output.past_key_values, HybridCache if kind == "hybrid" else SlidingWindowCache)


def test_direct_calls_with_every_kind() -> None:
    model = load_model("mistral").model
    ids = make_inputs(model)["input_ids"]
    expected = model(ids).logits
    for kind in KINDS:
        if kind in ("quantized", "mamba", "sink"):  # exact ones; a sink is seen from outside the window too
            continue
        cache = model.new_cache(kind, 3, 22)
        parts = [
            model(part, past_key_values=cache, use_cache=True).logits
            for part in (ids[:, :11], ids[:, 11:12], ids[:, 12:15], ids[:, 15:])
        ]
        torch.testing.assert_close(torch.cat(parts, 1), expected, atol=2e-5, rtol=1e-4)
        assert cache.lengths == [22] * 3 and cache.seen_tokens == 22


# --- sinks --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shallow() -> Any:
    """A Llama of one layer: what a position sees is then all that matters for it."""
    from unspool.models.registry import build_model
    from unspool.models.weights import MemorySource

    generator = torch.Generator().manual_seed(8)
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    shapes = {
        "model.embed_tokens.weight": (61, 32),
        "lm_head.weight": (61, 32),
        "model.norm.weight": (32,),
        "model.layers.0.input_layernorm.weight": (32,),
        "model.layers.0.post_attention_layernorm.weight": (32,),
        "model.layers.0.self_attn.q_proj.weight": (32, 32),
        "model.layers.0.self_attn.k_proj.weight": (16, 32),
        "model.layers.0.self_attn.v_proj.weight": (16, 32),
        "model.layers.0.self_attn.o_proj.weight": (32, 32),
        "model.layers.0.mlp.gate_proj.weight": (48, 32),
        "model.layers.0.mlp.up_proj.weight": (48, 32),
        "model.layers.0.mlp.down_proj.weight": (32, 48),
    }
    weights = {name: torch.randn(shape, generator=generator) * 0.4 for name, shape in shapes.items()}
    return build_model(config, MemorySource(weights))


def test_sinks_stand_before_the_window(shallow: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With blocks of one position, the last token sees its window as a text of its own: sinks, then the last ones."""
    monkeypatch.setattr("unspool.cache.sink.BLOCK", 1)
    ids = torch.randint(0, 61, (1, 150), generator=torch.Generator().manual_seed(1))
    cache = SinkCache(12, 3)
    for place in range(150):
        found = shallow.forward(ids[:, place : place + 1], cache).logits
        seen = ids[:, : place + 1] if place < 12 else torch.cat((ids[:, :3], ids[:, place - 8 : place + 1]), dim=1)
        torch.testing.assert_close(found, shallow(seen).logits[:, -1], atol=1e-4, rtol=1e-4)
    assert cache.nbytes == 12 * 2 * 2 * 8 * 4


@pytest.mark.parametrize("name", ["llama", "gemma2", "bloom", "phi"])
def test_sinks_do_not_depend_on_how_a_text_is_cut(name: str) -> None:
    model = load_model(name).model
    length = 120
    ids = torch.randint(3, model.info.vocab_size, (2, length), generator=torch.Generator().manual_seed(2))

    def read(sizes: Callable[[int], int]) -> torch.Tensor:
        cache, first, parts = SinkCache(16, 3), 0, []
        while first < length:
            num_new = min(sizes(first), cache.longest_pass or 1, length - first)
            parts.append(model.forward(ids[:, first : first + num_new], cache, want=Want("all")).logits)
            first += num_new
        return torch.cat(parts, dim=1)

    one = read(lambda _: 1)
    torch.testing.assert_close(read(lambda _: 64), one, atol=2e-3, rtol=1e-3)
    torch.testing.assert_close(read(lambda first: 1 + first % 7), one, atol=2e-3, rtol=1e-3)
    # Before anything is let go it is the model itself; a model's own window stays.
    same = min(16, model.info.window or 16)
    torch.testing.assert_close(one[:, :same], model(ids[:, :same]).logits, atol=1e-3, rtol=1e-3)


def test_sinks_go_on_past_the_context() -> None:
    model = load_model("llama").model
    inputs, told = make_inputs(model), {"window_length": 24, "num_sink_tokens": 4}
    assert model.info.max_context == 128
    settings = {"max_new_tokens": 150, "eos_token_id": None, "cache_implementation": "sink", "cache_config": told}
    found = unspool.generate(model, **inputs, **settings)
    assert found.shape == (3, 172)
    alone = unspool.generate(model, inputs["input_ids"][:1, 9:], **settings)
    assert torch.equal(found[0, 9:], alone[0])
    cache = SinkCache(**told)
    unspool.generate(model, inputs["input_ids"], max_new_tokens=150, eos_token_id=None, past_key_values=cache)
    assert (cache.get_seq_length(), cache.seen_tokens, cache.lengths) == (24, 171, [171] * 3)
    shape = model.key_shape
    assert cache.nbytes == 3 * shape.num_layers * 24 * 2 * shape.num_kv_heads * shape.head_dim * 4


def test_a_pass_over_sinks_is_not_too_long() -> None:
    """Sinks stand still during a pass, so a longer one would answer otherwise than its parts."""
    model, cache = load_model("llama").model, SinkCache(12, 2)
    ids = make_inputs(model, 60)["input_ids"]
    longest = cache.longest_pass
    assert longest == 12 + BLOCK - 1
    with pytest.raises(InputError, match=r"a pass of 60 positions is too long for this SinkCache.* after 43;"):
        model(ids, past_key_values=cache)
    with pytest.raises(InputError, match="at most cache"):
        model.forward(ids, cache)
    assert cache.lengths == [] and cache.longest_pass == longest
    model(ids[:, :longest], past_key_values=cache)
    model.forward(ids[:, longest:], cache)
    assert cache.lengths == [60] * 3


def test_sinks_refuse_learned_positions() -> None:
    model = load_model("gpt2").model
    with pytest.raises(UnsupportedError, match="learned one by one"):
        unspool.generate(model, [[5, 6]], cache_implementation="sink", max_new_tokens=4)
    with pytest.raises(UnsupportedError, match="learned one by one"):
        unspool.generate(model, [[5, 6]], past_key_values=SinkCache(8, 2), max_new_tokens=4)
    with pytest.raises(UnsupportedError, match="learned its positions"):
        model(torch.tensor([[5, 6]]), past_key_values=SinkCache(8, 2))


@pytest.mark.parametrize(("window", "sinks"), [(4, 4), (0, 0), (True, 0), (8, -1), (8.0, 2)])
def test_sinks_need_a_window(window: Any, sinks: Any) -> None:
    with pytest.raises(SettingError, match="sink cache"):
        SinkCache(window, sinks)


def test_sinks_behind_the_references_surface() -> None:
    """What is kept is turned as if it had been rotated at its new place; the sinks stay."""
    frequency = 10_000.0 ** -(torch.arange(0, 4, dtype=torch.float32) / 4)

    def angles(first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        angle = torch.arange(first, first + count).float()[:, None] * torch.cat((frequency, frequency))
        return angle.cos()[None], angle.sin()[None]

    def rotate(keys: torch.Tensor, first: int) -> torch.Tensor:
        cos, sin = (part[0] for part in angles(first, keys.shape[2]))
        one, two = keys.chunk(2, dim=-1)
        return keys * cos + torch.cat((-two, one), dim=-1) * sin

    raw, values = torch.randn(2, 1, 2, 20, 8), torch.randn(1, 2, 20, 8)
    cache = SinkCache(10, 2)
    for place in range(20):
        position = cache.get_seq_length()
        cos, sin = angles(position, 1)
        for layer in range(2):
            keys, read = cache.update(
                rotate(raw[layer][:, :, place : place + 1], position),
                values[:, :, place : place + 1],
                layer,
                {"cos": cos, "sin": sin},
            )
            kept = list(range(place + 1)) if place < 10 else [0, 1, *range(place - 7, place + 1)]
            assert torch.equal(read, values[:, :, kept])
            shift = 0 if place < 10 else 1  # the newest stands at the window's length, those before it follow
            at = [*range(min(2, place + 1)), *(n + shift for n in range(2, len(kept)))]
            expected = torch.cat([rotate(raw[layer][:, :, k : k + 1], p) for k, p in zip(kept, at, strict=True)], 2)
            torch.testing.assert_close(keys, expected, atol=1e-5, rtol=1e-5)
    assert (cache.get_max_cache_shape(), cache.seen_tokens, len(cache)) == (10, 20, 2)
    with pytest.raises(SettingError, match="filled through update"):
        cache.begin(1, 1)


# --- caches that can't be, and caches that are given back ------------------------------------------------------


def test_caches_of_another_model_are_refused() -> None:
    model, ids = load_model("mistral").model, [[5, 6, 7]]
    sizes = model.config
    wrong: dict[str, tuple[Cache, str]] = {
        "dtype": (StaticCache(sizes, 1, 20, "cpu", torch.bfloat16), "bfloat16"),
        "layers": (model.new_cache("static", 1, 20), "has 2 layers and the model 3"),
        "window": (SlidingWindowCache(sizes, 1), "its window is 7 and the model's 8"),
    }
    wrong["layers"][0]._buffers.pop()
    wrong["window"][0].window = 7
    filled = DynamicCache()
    filled.update(torch.zeros(1, 1, 2, 3), torch.zeros(1, 1, 2, 3), 0)
    wrong["heads"] = (filled, "1 heads of width 3")
    wrong["packed window"] = (model.new_cache("quantized_hybrid", 1, 20), "its window is 7 and the model's 8")
    wrong["packed window"][0].window = 7
    wrong["kinds"] = (load_model("gemma2").model.new_cache("hybrid", 1, 20), "layers|layer")
    for cache, what in wrong.values():
        held = list(cache.lengths)
        with pytest.raises(SettingError, match=what):
            unspool.generate(model, ids, past_key_values=cache, max_new_tokens=4)
        with pytest.raises(InputError, match=what):
            model(torch.tensor(ids), past_key_values=cache)
        assert cache.lengths == held
    with pytest.raises(SettingError, match=r"have room for 5 positions.*needs 8, 3 more"):
        unspool.generate(model, ids, past_key_values=model.new_cache("static", 1, 5), max_new_tokens=6)
    with pytest.raises(SettingError, match="hold 2 rows and the prompt has 1"):
        cache = model(torch.tensor([[5, 6], [7, 8]])).past_key_values
        unspool.generate(model, ids, past_key_values=cache, max_new_tokens=6)


SMALL_BLOCKS = {"q_group_size": 4, "residual_length": 3}
TOLD: dict[str, dict[str, Any] | None] = {
    **dict.fromkeys(("dynamic", "static", "paged", "offloaded", "offloaded_static", "hybrid")),
    **dict.fromkeys(("quantized", "quantized_static", "quantized_hybrid", "offloaded_quantized_hybrid"), SMALL_BLOCKS),
    "sink": {"window_length": 12, "num_sink_tokens": 2},
}


@pytest.mark.parametrize("kind", TOLD)
@pytest.mark.parametrize("copies", [1, 2])
def test_a_failed_call_gives_the_cache_back(kind: str, copies: int) -> None:
    model, told = load_model("llama").model, TOLD[kind]
    ids = make_inputs(model)["input_ids"]
    cache = model.new_cache(kind, 6, 40, config=told)
    model(ids[:, :15], past_key_values=cache)
    expected = model(ids[:, 15:16], past_key_values=cache.clone()).logits

    def fail(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores if input_ids.shape[1] < 30 else torch.full_like(scores, -torch.inf)

    with pytest.raises(NoTokenLeftError):
        unspool.generate(
            model,
            ids,
            past_key_values=cache,
            max_new_tokens=12,
            eos_token_id=None,
            logits_processor=[fail],
            num_return_sequences=copies,
            do_sample=copies > 1,
        )
    assert cache.lengths == [15] * 3
    torch.testing.assert_close(model(ids[:, 15:16], past_key_values=cache).logits, expected)


def test_given_caches_are_gone_on_with() -> None:
    model = load_model("mistral").model
    ids = make_inputs(model)["input_ids"]
    settings = {"eos_token_id": None, "pad_token_id": None}
    first = unspool.generate(model, ids, max_new_tokens=9, **settings)
    mask = torch.ones_like(first)
    expected = unspool.generate(model, first, attention_mask=mask, max_new_tokens=5, **settings)
    for cache in (
        SlidingWindowCache(model.config, 3),
        model.new_cache("hybrid", 3, 60),
        OffloadedStaticCache(model.config, 3, 60, "cpu"),
        PagedCache(block_size=16),
        DynamicCache(),
    ):
        found = unspool.generate(model, ids, past_key_values=cache, max_new_tokens=9, **settings)
        assert torch.equal(found, first)
        assert cache.lengths == [30] * 3
        again = unspool.generate(model, first, attention_mask=mask, past_key_values=cache, max_new_tokens=5, **settings)
        assert torch.equal(again, expected)


def test_blocks_are_what_the_docs_say() -> None:
    assert BLOCK == 32


def test_growth_costs_little_memory() -> None:
    """At most 1.1 times the keys' own bytes at long contexts, and no second copy but of one layer."""
    cache = DynamicCache()
    for length in (1000, 3000, 9000):
        cache.begin(1, length - max(cache.lengths, default=0))
        for layer in range(2):
            cache.write(layer, torch.zeros(1, length - max(cache.lengths, default=0), 2, 2, 4))
        cache.end()
        own = length * 2 * 2 * 2 * 4 * 4
        if length >= 3000:
            assert cache.nbytes <= 1.1 * own
