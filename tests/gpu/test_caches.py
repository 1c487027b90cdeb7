"""Kinds of cache on a GPU: offloaded ones answer as those that stay, ragged rows included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.conformance.cases import GOLDENS
from tests.gpu.models import make_model

import unspool

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(scope="module", params=["llama", "mistral", "gemma2"])
def model(request: pytest.FixtureRequest) -> Any:
    return unspool.load(GOLDENS / "models" / request.param, device="cuda", dtype="float32").model


@pytest.fixture(autouse=True)
def _dirty_memory() -> None:
    """What is given back here is given out again: a kind must not read what it never wrote."""
    if torch.cuda.is_available():
        made = [torch.full((size,), torch.nan, device="cuda") for size in (1 << 8, 1 << 12, 1 << 16, 1 << 22) * 32]
        del made


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("static", None),
        ("hybrid", None),
        ("offloaded", None),
        ("offloaded", {"resident_layers": 2}),
        ("offloaded_static", None),
        ("offloaded_hybrid", None),
        ("sink", {"window_length": 100, "num_sink_tokens": 4}),
    ],
)
@pytest.mark.parametrize("way", [{}, {"num_beams": 3}, {"do_sample": True, "seed": 1, "num_return_sequences": 2}])
def test_kinds_agree(model: Any, kind: str, told: dict[str, Any] | None, way: dict[str, Any]) -> None:
    ids = torch.randint(3, model.info.vocab_size, (3, 22), generator=torch.Generator().manual_seed(4))
    mask = torch.ones_like(ids)
    mask[0, :9], mask[1, :19] = 0, 0
    if kind == "sink" and model.info.window is not None:
        pytest.skip("a sink stays in sight where the model's own window has passed it")
    common = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 20, "eos_token_id": None, **way}
    expected = unspool.generate(model, **common)
    more = {"cache_implementation": kind, **({"cache_config": told} if told else {})}
    found = unspool.generate(model, **common, **more, return_dict_in_generate=True)
    assert torch.equal(found.sequences, expected)
    if kind not in ("sink",) and "num_beams" not in way:
        assert found.stats.path == "captured"


def test_passes_carried_and_passes_by_address_follow_each_other(model: Any) -> None:
    """A prompt's pass carries keys over, a step reads them at home, the next prompt's pass carries what steps wrote."""
    ids = torch.randint(3, model.info.vocab_size, (1, 40), generator=torch.Generator().manual_seed(6)).cuda()
    caches = [unspool.DynamicCache(), unspool.OffloadedCache()]
    for first, last in ((0, 15), (15, 16), (16, 17), (17, 30), (30, 31), (31, 40)):
        logits = [model.forward(ids[:, first:last], cache).logits for cache in caches]
        assert float((logits[0] - logits[1]).abs().max()) < 2e-5 * float(logits[0].abs().max())
        if last == 31:  # what was read ahead must not be taken for what is there now
            for cache in caches:
                cache.truncate([29])
                model.forward(ids[:, :1], cache)
                model.forward(ids[:, 1:2], cache)


@pytest.mark.parametrize("way", [{}, {"num_beams": 3}])
def test_packed_keys_answer_alike_where_they_lie_elsewhere(model: Any, way: dict[str, Any]) -> None:
    ids = torch.randint(3, model.info.vocab_size, (2, 40), generator=torch.Generator().manual_seed(4))
    told = {"nbits": 8, "q_group_size": 16, "residual_length": 16}
    asked = {"max_new_tokens": 20, "eos_token_id": None, "cache_config": told, **way}
    near = unspool.generate(model, ids, cache_implementation="quantized_hybrid", **asked)
    assert torch.equal(unspool.generate(model, ids, cache_implementation="offloaded_quantized_hybrid", **asked), near)


def test_linked_memory_is_the_hosts(model: Any) -> None:
    from unspool.cache.offload.memory import take_linked

    before = torch.cuda.memory_allocated()
    linked = take_linked((1024, 1024), torch.bfloat16, torch.device("cuda"))
    assert linked.is_cuda and torch.cuda.memory_allocated() - before < 1 << 20
    linked.copy_(torch.arange(1024, device="cuda").bfloat16().expand(1024, 1024))
    assert linked.float().sum(dim=0).eq(linked[0].float() * 1024).all()


def test_only_two_layers_are_on_the_device(model: Any) -> None:
    cache = unspool.OffloadedCache()
    unspool.generate(model, torch.full((2, 30), 5), max_new_tokens=20, eos_token_id=None, past_key_values=cache)
    assert all(buffer.device.type == "cpu" and buffer.is_pinned() for buffer in cache._buffers)
    assert cache.device_bytes <= 2 * cache.nbytes // len(cache)
    other = cache.clone()
    assert torch.equal(other[0][0], cache[0][0])


@pytest.mark.parametrize("kind", ["sliding_window", "hybrid", "offloaded_hybrid"])
def test_rings_in_captured_steps(kind: str) -> None:
    """Ragged rows far past the window, beside a cache of every key; drafts are tried and taken back between steps."""
    window = 50
    model = make_model(window, torch.float32, 3)
    tokens = torch.randint(3, 96, (3, 200), generator=torch.Generator().manual_seed(8)).cuda()
    near, far = unspool.DynamicCache(), model.new_cache(kind, 3, 300)
    for cache in (near, far):
        model.forward(tokens[:, :60], cache, counts=[60, 3, 41])
    for column in range(60, 200):
        made = []
        for cache in (near, far):
            if column == 100:
                cache.select_rows([2, 0, 1])
            if column in (80, 120):
                cache.begin_trial()
                held = list(cache.lengths)
                assert model.forward(tokens[:, column : column + 1], cache).path == (
                    "captured" if cache is near else "eager"
                )
                cache.truncate(held)
            made.append(model.forward(tokens[:, column : column + 1], cache))
        assert [forward.path for forward in made] == ["captured"] * 2
        expected, found = (forward.logits for forward in made)  # prompts were read in another order of sums
        assert (found - expected).norm() < 2e-5 * expected.norm()
    assert far.nbytes < near.nbytes
