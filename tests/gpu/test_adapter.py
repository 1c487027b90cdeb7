"""Models of transformers through the adapter on a GPU: tokens as transformers' own, whatever holds their keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.models.adapters.tiny import make, make_inputs

import unspool
from unspool.cache import KINDS

pytestmark = pytest.mark.gpu

NEW = {"max_new_tokens": 10, "eos_token_id": None}


@pytest.fixture(autouse=True, scope="module")
def needs_cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


def move(inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {name: value.cuda() for name, value in inputs.items()}


@pytest.mark.parametrize("name", ["llama", "gemma2", "bloom", "stablelm", "cohere2", "mpt", "bart", "t5"])
def test_tokens_are_the_references(name: str) -> None:
    model = make(name).cuda()
    inputs = move(make_inputs(is_left=name not in ("bart", "t5")))
    for settings in ({}, {"num_beams": 3}):
        expected = model.generate(**inputs, **NEW, **settings, do_sample=False)
        assert torch.equal(unspool.generate(model, **inputs, **NEW, **settings), expected)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("mamba", "sliding_window", "sink")])
def test_every_kind_answers_alike(kind: str) -> None:
    model, inputs = make("stablelm").cuda(), move(make_inputs())
    told = {"nbits": 8, "q_group_size": 1, "residual_length": 4} if "quantized" in kind else None
    told = told and {**told, "axis_value": 1, "compute_dtype": torch.float32}
    found = unspool.generate(model, **inputs, **NEW, cache_implementation=kind, cache_config=told)
    assert torch.equal(found, unspool.generate(model, **inputs, **NEW))
