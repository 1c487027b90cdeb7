"""Layers laid over several devices: what is laid where, what is refused, and that a pass through them says the same.

There is one device here: `cpu:0` and `cpu` are two names of it, which are moved between as two devices would be.
tests/gpu/test_placement.py has a CPU and a GPU.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from tests.conformance.cases import GOLDENS

import unspool
from unspool.errors import ResourceError, SettingError, UnsupportedError
from unspool.models.placement import DeviceRequest, PartSizes, Placement, read_device_request

CPU, OTHER = torch.device("cpu"), torch.device("cpu", 0)
PARTS = PartSizes(("model.embed_tokens", "model.layers.0", "model.layers.1", "lm_head"), (100, 40, 40, 100))
CARDS = [torch.device("cuda", index) for index in range(3)]


def load_spread(name: str) -> Any:
    """A golden model whose first layer and head lie elsewhere."""
    return unspool.load(GOLDENS / "models" / name, device_map={"": "cpu", FIRST[name]: "cpu:0"}).model


FIRST = {"llama": "model.layers.0", "gpt2": "transformer.h.1", "gemma2": "model.layers.1", "bloom": "transformer.h.0"}
CALLS: list[dict[str, Any]] = [
    {},
    {"num_beams": 3, "num_return_sequences": 2},
    {"do_sample": True, "seed": 4, "top_k": 20},
    {"penalty_alpha": 0.6, "top_k": 4},
    {"prompt_lookup_num_tokens": 3},
    {"dola_layers": "high"},
    {"cache_implementation": "static"},
    {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
]


@pytest.mark.parametrize("name", sorted(FIRST))
def test_every_strategy_says_what_one_device_says(name: str) -> None:
    spread, whole = load_spread(name), unspool.load(GOLDENS / "models" / name, device="cpu").model
    assert spread.placement is not None and len(spread.placement.devices) == 2
    ids = torch.tensor([[0, 5, 6, 7], [9, 8, 7, 6]])
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    for call in CALLS:
        given = {"attention_mask": mask, "max_new_tokens": 8, "pad_token_id": 0, **call}
        made = [unspool.generate(model, ids, **given) for model in (spread, whole)]
        assert torch.equal(*made), call
    for field in ("hidden_states", "attentions"):
        wanted = {f"output_{field}": True}
        seen = [getattr(model(ids, attention_mask=mask, **wanted), field) for model in (spread, whole)]
        assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(*seen, strict=True))


def test_what_lies_on_several_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    spread = load_spread("llama")
    with pytest.raises(UnsupportedError, match="is not moved"):
        spread.to(torch.float64)
    with pytest.raises(UnsupportedError, match="'paged' cache lies on one device"):
        spread.new_cache("paged")
    with pytest.raises(UnsupportedError, match="several devices"):
        unspool.generate(spread, torch.tensor([[5]]), max_new_tokens=2, compile_config=unspool.CompileConfig())
    for one in (copy.deepcopy(spread), pickle.loads(pickle.dumps(spread))):  # noqa: S301 - our own
        assert one.placement == spread.placement
    model = unspool.AutoModelForCausalLM.from_pretrained(
        GOLDENS / "models" / "llama", device_map={"": "cpu", "model.layers.0": "cpu:0"}
    )
    assert model.hf_device_map["layers.0"] == "cpu:0" and model.hf_device_map["head"] == "cpu"
    for kind in ("t5", "mamba"):
        with pytest.raises(UnsupportedError, match="only decoders"):
            unspool.load(GOLDENS / "models" / kind, device_map={"": "cpu", "x": "cpu:0"})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    whole = unspool.AutoModelForCausalLM.from_pretrained(GOLDENS / "models" / "llama", device_map="auto")
    assert whole.hf_device_map == {"": "cpu"}


def place(layout: Any, memory: dict[torch.device, int] | None = None) -> Placement:
    request = DeviceRequest(layout, None if memory is None else tuple(memory.items()))
    return request.place(PARTS)


def test_layers_go_where_there_is_room() -> None:
    first, second, third = CARDS
    assert place("auto", {first: 1000, CPU: 1000}).layers == (first, first)
    assert place("sequential", {first: 250, second: 1000}) == Placement(first, (first, second), first)
    assert place("auto", {first: 210, second: 50, CPU: 50}).layers == (second, CPU)
    assert place("balanced", {first: 1000, second: 1000}).layers == (second, second)  # the ends are more than half
    assert place("balanced_low_0", {first: 1000, second: 1000, third: 1000}).layers == (second, second)
    for memory in ({first: 10, CPU: 1000}, {first: 230, CPU: 30}):
        with pytest.raises(ResourceError, match="don't fit the devices"):
            place("auto", memory)


def test_maps_name_parts_or_what_stands_above_them() -> None:
    first, second, _ = CARDS
    whole = (("", first), ("model.layers.1", second))
    assert place(whole) == Placement(first, (first, second), first)
    parts = (("model.embed_tokens", first), ("model.layers", second), ("lm_head", CPU))
    assert place(parts) == Placement(first, (second, second), CPU)
    within = (("", first), ("model.layers.0.mlp", first), ("model.layers.0.self_attn", first))
    assert place(within).layers == (first, first)
    with pytest.raises(UnsupportedError, match="on several devices; a layer lies on one"):
        place((("", first), ("model.layers.0.mlp", second)))
    with pytest.raises(SettingError, match="says nothing of 'lm_head'"):
        place((("model", first),))
    with pytest.raises(ResourceError, match="max_memory allows"):
        place(whole, {first: 100})


@pytest.mark.parametrize(
    ("device_map", "max_memory", "words"),
    [
        ("cuda:77", None, "torch finds"),
        ({"": "cpu", "lm_head": "cuda:77"}, None, "torch finds"),
        ("cpu:3", None, "one CPU"),
        ({"": "disk"}, None, "held in memory"),
        ("nowhere", None, "not a device that torch knows"),
        ({}, None, "at least one"),
        ({1: "cpu"}, None, "parts are texts"),
        (1.5, None, "not a device"),
        (True, None, "not a device"),
        ("auto", {"cpu": "many"}, "no number of bytes"),
        ("auto", {"cpu": -1}, "no number of bytes"),
        ("auto", {"cpu": float("nan")}, "no number of bytes"),
        ("auto", "10GiB", "no mapping"),
        ("auto", {"cpu": "10KiB"}, "don't fit"),
    ],
)
def test_what_can_t_be(device_map: Any, max_memory: Any, words: str) -> None:
    for load in (unspool.load, unspool.AutoModelForCausalLM.from_pretrained):
        with pytest.raises((SettingError, UnsupportedError, ResourceError), match=words):
            load(GOLDENS / "models" / "llama", device_map=device_map, max_memory=max_memory)
    with pytest.raises(SettingError, match="give one"):
        unspool.load(GOLDENS / "models" / "llama", device="cpu", device_map=device_map)


def test_memory_has_units() -> None:
    for text, expected in (("10GiB", 10 << 30), ("1.5kb", 1500), ("200", 200), ("3 MiB", 3 << 20), (7, 7)):
        request = read_device_request("auto", {"cpu": text})
        assert isinstance(request, DeviceRequest) and request.memory == ((CPU, expected),)
