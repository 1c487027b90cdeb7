"""Layers on a GPU and on the CPU: the same tokens as on one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.conformance.cases import GOLDENS

import unspool
from unspool.models.weights import TableLinear

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
LLAMA = GOLDENS / "models" / "llama"
CALLS: list[dict[str, Any]] = [
    {},
    {"num_beams": 3, "num_return_sequences": 2},
    {"do_sample": True, "seed": 4, "top_k": 20},
    {"penalty_alpha": 0.6, "top_k": 4},
    {"prompt_lookup_num_tokens": 3},
    {"dola_layers": "high"},
    {"cache_implementation": "static"},
]


@pytest.mark.parametrize(
    "device_map",
    [
        {"": "cuda", "model.layers.1": "cpu"},
        {"": "cuda", "model.layers.0": "cpu"},
        {"": "cpu", "model.layers.1": "cuda"},
        {"": "cpu", "model.layers": "cuda"},
    ],
)
def test_layers_on_both(device_map: dict[str, str]) -> None:
    whole = unspool.load(LLAMA, device="cpu").model
    spread = unspool.load(LLAMA, device_map=device_map, dtype="float32").model
    assert {device.type for device in spread.placement.devices} == {"cpu", "cuda"}
    ids, mask = torch.tensor([[0, 5, 6, 7], [9, 8, 7, 6]]), torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    for call in CALLS:
        given = {"max_new_tokens": 10, "pad_token_id": 0, **call}
        expected = unspool.generate(whole, ids, attention_mask=mask, **given)
        made = unspool.generate(spread, ids.to(spread.device), attention_mask=mask.to(spread.device), **given)
        assert torch.equal(made.cpu(), expected), call


@pytest.mark.parametrize("name", ["gpt2", "bloom", "gemma2", "mistral"])
def test_families_by_memory(name: str) -> None:
    """The GPU gets the ends and a part of the layers."""
    folder = GOLDENS / "models" / name
    whole = unspool.load(folder, device="cpu").model
    size = whole.weights_bytes
    for share in (0.55, 0.75, 0.9):
        spread = unspool.load(
            folder, device_map="auto", max_memory={0: int(share * size), "cpu": "1GiB"}, dtype="float32"
        ).model
        ids = torch.tensor([[5, 6, 7, 8]])
        made = unspool.generate(spread, ids.to(spread.device), max_new_tokens=10).cpu()
        assert torch.equal(made, unspool.generate(whole, ids, max_new_tokens=10))


def test_all_of_it_fits_one() -> None:
    model = unspool.AutoModelForCausalLM.from_pretrained(LLAMA, device_map="auto")
    assert model.hf_device_map == {"": "cuda:0"} and model.core.placement is None
    codes = unspool.load(LLAMA, device_map="auto", quantize="nf4").model
    assert isinstance(codes.weights.layers[0].up, TableLinear)
