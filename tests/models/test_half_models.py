"""Whole models in half precision where torch has no fast products of it, which the tests say of every machine."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import unspool
from unspool.kernels import halves
from unspool.models.registry import build_model
from unspool.models.weights import MemorySource

HALVES = (torch.bfloat16, torch.float16)
FAMILIES = ("llama", "gemma2", "gpt2", "bloom", "qwen3_moe")
TOKENS = torch.tensor([[5, 17, 33, 8, 71, 4, 9, 12, 60, 2, 44, 31]])


@pytest.fixture(autouse=True)
def is_slow_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(halves, "lacks_products", lambda dtype: dtype in HALVES)


@pytest.fixture(params=HALVES, ids=["bfloat16", "float16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    found: torch.dtype = request.param
    return found


@pytest.fixture(params=FAMILIES)
def pair(request: pytest.FixtureRequest, pair_of: Callable[[str], Any]) -> Any:
    return pair_of(request.param)


def test_logits_stay_near_float32(pair: Any, dtype: torch.dtype) -> None:
    """As near as the dtype's digits let a few layers be: prompts and steps, warnings being errors."""
    model = build_model(pair.config, MemorySource(pair.weights), dtype=dtype)
    exact, bound = pair.native(TOKENS).logits, 0.1 if dtype == torch.bfloat16 else 0.02
    cache = model.new_cache()
    read = [
        model.forward(TOKENS[:, :8], cache).logits,
        *(model.forward(TOKENS[:, i, None], cache).logits for i in (8, 9)),
    ]
    for place, logits in zip((7, 8, 9), read, strict=True):
        assert logits.dtype == dtype
        gap = float((logits.float() - exact[:, place]).abs().max())
        assert gap < bound * float(exact.abs().max()), (place, gap)


def test_a_row_alone_is_a_row_in_a_batch(pair: Any, dtype: torch.dtype) -> None:
    model = build_model(pair.config, MemorySource(pair.weights), dtype=dtype)
    rows = torch.cat((TOKENS, TOKENS.flip(1), TOKENS.roll(3, 1)))
    told = {"max_new_tokens": 6, "eos_token_id": None, "pad_token_id": 0}
    together = unspool.generate(model, rows, **told)
    assert all(
        torch.equal(unspool.generate(model, row[None], **told)[0], both)
        for row, both in zip(rows, together, strict=True)
    )


def test_copies_and_moves_compute_the_same(pair_of: Callable[[str], Any], dtype: torch.dtype) -> None:
    """Nothing is kept beside the matrices: what is written to them counts at once."""
    pair = pair_of("llama")
    model = build_model(pair.config, MemorySource(pair.weights), dtype=dtype)
    logits = model(TOKENS).logits
    assert torch.equal(copy.deepcopy(model)(TOKENS).logits, logits)
    assert torch.equal(model.to(torch.float32).to(dtype)(TOKENS).logits, logits)
    model.weights.layers[0].down.weight.zero_()
    assert not torch.equal(model(TOKENS).logits, logits)


@pytest.mark.parametrize("cache", ["static", "quantized", "paged", "sink"])
def test_caches_are_read_in_half_precision(pair_of: Callable[[str], Any], dtype: torch.dtype, cache: str) -> None:
    pair = pair_of("llama")
    model = build_model(pair.config, MemorySource(pair.weights), dtype=dtype)
    told: dict[str, Any] = {"max_new_tokens": 4, "eos_token_id": None, "cache_implementation": cache}
    plain = unspool.generate(model, TOKENS, **{**told, "cache_implementation": "dynamic"})
    assert torch.equal(unspool.generate(model, TOKENS, **told), plain)  # nothing is packed or dropped so soon
