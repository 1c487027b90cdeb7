"""Packed caches beside plain ones: logits are off by as much as the bits say, and a wrong number in the packing shows.

Every text is forced, so that each step compares the same history. How far logits are off is told as a part of their
spread and in steps: a step is a group's range over `2^nbits - 1`, so one number holds for all widths. It depends on how
a model's weights enlarge an error: `MOST_STEPS` is some 1.6 times the largest that was measured.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from tests.conformance.cases import load_model

import unspool
from unspool.cache import quantized
from unspool.cache.stores.quantization import Backend
from unspool.kernels.packing import Fit, fit_range

MOST_STEPS = {"llama": 7.0, "gpt2": 3.0, "gemma2": 6.0, "mistral": 4.5, "bloom": 3.5, "qwen3": 5.0}
KINDS = ["quantized", "quantized_static", "quantized_hybrid", "offloaded_quantized_hybrid", "paged_quantized"]
# Mistral's window is no longer than the block that a pool packs.
CASES = [(name, kind) for name in MOST_STEPS for kind in KINDS if (name, kind) != ("mistral", "paged_quantized")]
NEW = 20
IDS = torch.randint(3, 160, (2, 70), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS)
MASK[1, :11] = 0
FOLLOWING = torch.randint(3, 160, (2, NEW), generator=torch.Generator().manual_seed(1))


def force(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    step = input_ids.shape[1] - IDS.shape[1]
    return torch.full_like(scores, -torch.inf).scatter_(1, FOLLOWING[:, step : step + 1], 0.0)


def read(name: str, **settings: Any) -> torch.Tensor:
    """The logits of the prompt's last token and of every step: (steps, rows, vocab)."""
    asked = {"attention_mask": MASK, "max_new_tokens": NEW, "eos_token_id": None, "logits_processor": [force]}
    asked |= {"return_dict_in_generate": True, "output_logits": True, **settings}
    return torch.stack(unspool.generate(load_model(name).model, IDS, **asked).logits)


@cache
def read_exact(name: str) -> torch.Tensor:
    return read(name)


def count_steps(name: str, kind: str, nbits: int) -> float:
    """How far packed logits are off, in steps of the packing."""
    group = 16 if kind == "paged_quantized" else 4  # a block of the pool is packed whole
    config = {"nbits": nbits, "q_group_size": group, "residual_length": 1}
    if kind == "paged_quantized":
        config["block_size"] = group
    exact = read_exact(name)
    off = (read(name, cache_implementation=kind, cache_config=config) - exact).pow(2).mean().sqrt()
    return float(off / exact.std()) * (2**nbits - 1)


@pytest.mark.parametrize("nbits", [2, 4, 8])
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_logits_are_off_by_a_few_steps(name: str, kind: str, nbits: int) -> None:
    assert 0.3 < count_steps(name, kind, nbits) < MOST_STEPS[name]


Spoil = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
FAULTS: dict[str, Spoil] = {
    "a scale that is 5 % too large": lambda codes, scale, zero: (codes, scale * 1.05, zero),
    "zero points that are two steps too high": lambda codes, scale, zero: (codes, scale, zero + 2 * scale),
    "codes that are one place off": lambda codes, scale, zero: (codes.roll(1, dims=1), scale, zero),
    "the scales of other groups": lambda codes, scale, zero: (codes, scale.roll(1), zero.roll(1)),
}


def spoil(fault: str) -> Fit:
    def fit(groups: torch.Tensor, nbits: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return FAULTS[fault](*fit_range(groups, nbits, dtype))

    return fit


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3"])
def test_a_wrong_packing_is_beyond_the_bound(name: str, kind: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Backend, "find_fit", lambda _: spoil(fault))
    monkeypatch.setattr(quantized, "fit_range", spoil(fault))
    assert count_steps(name, kind, 8) > MOST_STEPS[name]
