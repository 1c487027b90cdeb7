"""Watermarks in whole calls, on a tiny model: every strategy, batches, streams, speculation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import unspool
from tests.conformance.cases import load_model
from unspool.config import GumbelWatermarkingConfig, SynthIDTextWatermarkingConfig, WatermarkingConfig
from unspool.errors import SettingError

GREEN = WatermarkingConfig(bias=6.0, greenlist_ratio=0.5)
SYNTHID = SynthIDTextWatermarkingConfig(3, [11, 22, 33, 44])
GUMBEL = GumbelWatermarkingConfig(context_width=2)
CONFIGS: list[Any] = [GREEN, WatermarkingConfig(seeding_scheme="selfhash", context_width=2), SYNTHID, GUMBEL]
PROMPTS = torch.tensor([[5, 6, 7, 8, 9, 10], [20, 21, 22, 23, 24, 25], [0, 0, 0, 41, 42, 43]])
MASK = torch.tensor([[1] * 6, [1] * 6, [0, 0, 0, 1, 1, 1]])


def generate(**settings: Any) -> torch.Tensor:
    inputs = {"input_ids": PROMPTS, "attention_mask": MASK, "max_new_tokens": 24, "eos_token_id": None}
    result = unspool.generate(load_model("llama").model, **{**inputs, **settings})
    assert isinstance(result, torch.Tensor)
    return result


def count_green(ids: torch.Tensor, config: WatermarkingConfig, prompt: int = 6) -> float:
    mark = config.construct_processor(160, "cpu")
    before, tokens = ids[:, prompt - 1 : -1].flatten(), ids[:, prompt:].flatten()
    return float(mark.are_green(before[:, None], tokens).float().mean())


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"do_sample": True, "seed": 1},
        {"num_beams": 3},
        {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
        {"prompt_lookup_num_tokens": 4},
        {"penalty_alpha": 0.3, "top_k": 4},
        {"num_beams": 2, "do_sample": True, "seed": 3},
    ],
    ids=str,
)
def test_green_lists_mark_every_strategy(settings: dict[str, Any]) -> None:
    plain = count_green(generate(**settings), GREEN)
    marked = count_green(generate(**settings, watermarking_config=GREEN), GREEN)
    assert marked > 0.85
    assert marked > plain + 0.2


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_a_row_alone_is_the_row_in_the_batch(config: Any) -> None:
    settings: dict[str, Any] = {"do_sample": True, "seed": [4, 5, 6], "watermarking_config": config}
    whole = generate(**settings)
    for row, first in enumerate((0, 0, 3)):
        own = {"input_ids": PROMPTS[row : row + 1, first:], "attention_mask": None, "seed": 4 + row}
        alone = generate(**{**settings, **own})
        assert alone[0, 6 - first :].tolist() == whole[row, 6:].tolist()


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_speculation_gives_the_tokens_of_plain_sampling(config: Any) -> None:
    """Guesses from the prompt are only choices: the verifier draws as plain sampling does."""
    settings: dict[str, Any] = {"do_sample": True, "seed": 7, "watermarking_config": config}
    assert torch.equal(generate(**settings, prompt_lookup_num_tokens=4), generate(**settings))


def test_gumbel_tokens_do_not_depend_on_the_drafter() -> None:
    settings: dict[str, Any] = {"do_sample": True, "watermarking_config": GUMBEL, "seed": 3}
    plain = generate(**settings)
    drafted = generate(**settings, assistant_model=load_model("llama_draft").model)
    is_new = torch.ones(24, dtype=torch.bool)
    for row in range(3):  # up to the first repeated context, where chance decides
        windows = plain[row, 4:].unfold(0, 2, 1).tolist()
        first = next((place for place, window in enumerate(windows) if window in windows[:place]), 24)
        is_new[first:] = False
        assert plain[row, 6 : 6 + first].tolist() == drafted[row, 6 : 6 + first].tolist()
    assert is_new.any()


def test_marks_stay_under_a_drafter() -> None:
    settings: dict[str, Any] = {"do_sample": True, "seed": 5, "watermarking_config": GREEN, "max_new_tokens": 60}
    drafted = generate(**settings, assistant_model=load_model("llama_draft").model)
    assert abs(count_green(drafted, GREEN) - count_green(generate(**settings), GREEN)) < 0.12
    assert count_green(drafted, GREEN) > 0.8


def test_every_prompt_may_have_its_own_key() -> None:
    other = WatermarkingConfig(bias=6.0, greenlist_ratio=0.5, hashing_key=99991)
    settings: dict[str, Any] = {"do_sample": True, "seed": [4, 5, 6]}
    mixed = generate(**settings, watermarking_config=[GREEN, None, other], num_return_sequences=2)
    for rows, config in ((slice(0, 2), GREEN), (slice(2, 4), None), (slice(4, 6), other)):
        whole = generate(**settings, watermarking_config=config, num_return_sequences=2)
        assert torch.equal(mixed[rows], whole[rows])
    with pytest.raises(SettingError, match="`watermarking_config` has 2 values for 3 prompts"):
        generate(watermarking_config=[GREEN, other])


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_streams_are_marked(config: Any) -> None:
    settings: dict[str, Any] = {"do_sample": True, "seed": 2, "watermarking_config": config, "max_new_tokens": 12}
    one = {"input_ids": PROMPTS[:1], "attention_mask": None}
    streamed = [
        token
        for emitted in unspool.stream(load_model("llama").model, eos_token_id=None, **{**one, **settings})
        for token in emitted.tokens.get(0, [])
    ]
    assert streamed == generate(**{**one, **settings})[0, 6:].tolist()


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({}, "is a way to sample"),
        ({"do_sample": True, "num_beams": 2}, "is a way to sample"),
        ({"do_sample": True, "num_return_sequences": 2}, "would give copies"),
    ],
)
def test_gumbel_is_refused_without_a_draw(settings: dict[str, Any], what: str) -> None:
    with pytest.raises(SettingError, match=what):
        generate(**settings, watermarking_config=GUMBEL)
    with pytest.raises(SettingError, match=what):
        generate(**settings, watermarking_config=[GREEN, GUMBEL, None])
