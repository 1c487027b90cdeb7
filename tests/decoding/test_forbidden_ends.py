"""What one setting forbids no other one revives; what a model can't take back is read again."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.grammar.tiny import load_tiny
from unspool.decoding.randomness import draw_uniform

PROMPTS = [[5, 6, 7, 8], [9, 10, 11, 12]]


@pytest.mark.parametrize("more", [{}, {"do_sample": True, "seed": 4}, {"num_beams": 3}], ids=str)
@pytest.mark.parametrize("fewest", [6, [6, 9]])
def test_a_decay_revives_no_end_token_that_is_forbidden(more: dict[str, Any], fewest: Any) -> None:
    """`remove_invalid_values` makes numbers of -inf, which a growing factor would lift above all others."""
    told = {"remove_invalid_values": True, "exponential_decay_length_penalty": (0, 4.0), "eos_token_id": 2, **more}
    found = load_tiny("llama").generate(PROMPTS, max_new_tokens=12, min_new_tokens=fewest, **told)
    for text, least in zip(found.token_ids, fewest if isinstance(fewest, list) else [fewest] * 2, strict=True):
        assert len(text) > least and 2 not in text[:least]


@pytest.mark.parametrize("name", ["mamba", "llama"])
def test_guidance_with_the_prompt_s_log_probabilities(name: str) -> None:
    lm = load_tiny(name)
    told: dict[str, Any] = {"max_new_tokens": 6, "guidance_scale": 1.5, "eos_token_id": None}
    plain = lm.generate(PROMPTS, **told)
    found = lm.generate(PROMPTS, **told, prompt_logprobs=2)
    alone = lm.generate(PROMPTS, max_new_tokens=1, prompt_logprobs=2)
    assert found.token_ids == plain.token_ids
    assert found.prompt_logprobs is not None and alone.prompt_logprobs is not None
    for row, expected in zip(found.prompt_logprobs, alone.prompt_logprobs, strict=True):
        for one, other in zip(row[1:], expected[1:], strict=True):
            assert one is not None and other is not None and abs(one.logprob - other.logprob) < 1e-3


@pytest.mark.parametrize("start", [0, -500_000, 2**31])
def test_neighbouring_seeds_draw_apart(start: int) -> None:
    """Over a million seeds, first draws of neighbours are as unlike as noise is: 5 standard deviations are 0.005."""
    seeds = torch.arange(1_000_000) + start
    for position in (0, 1, 6):
        drawn = draw_uniform(seeds, torch.full_like(seeds, position))
        for lag in (1, 2, 3):
            correlation = torch.corrcoef(torch.stack((drawn[:-lag], drawn[lag:])))[0, 1]
            assert abs(float(correlation)) < 0.005
