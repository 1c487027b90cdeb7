"""MusicGen: a row per codebook, delays, guidance over the batch; beside transformers' own generate."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from tests.models.adapters.unlike import FAMILIES, make_unlike

import unspool
from unspool.errors import SettingError, UnsupportedError


def find_inputs() -> dict[str, torch.Tensor]:
    return FAMILIES["musicgen"].inputs()


@pytest.mark.parametrize(
    "settings",
    [
        {"max_new_tokens": 9},
        {"max_new_tokens": 12, "guidance_scale": 3.0},
        {"max_length": 11, "guidance_scale": 1.0},
        {"max_new_tokens": 4},  # too short for delays
        {"max_new_tokens": 9, "suppress_tokens": [3, 4], "min_new_tokens": 9},
    ],
    ids=str,
)
def test_sounds_are_the_references(settings: dict[str, Any]) -> None:
    check_sounds("musicgen", settings)


@pytest.mark.parametrize("name", ["musicgen_stereo", "musicgen_melody"])
def test_two_channels_and_melodies(name: str) -> None:
    check_sounds(name, {"max_new_tokens": 9, "guidance_scale": 3.0})


def check_sounds(name: str, settings: dict[str, Any]) -> None:
    model = make_unlike(name)
    asked = {**find_inputs(), **settings, "do_sample": False}
    expected = model.generate(**asked)
    found = unspool.generate(model, **asked)
    torch.testing.assert_close(found, expected)


def test_a_sound_goes_on() -> None:
    model, inputs = make_unlike("musicgen"), find_inputs()
    sound = torch.randn(inputs["input_ids"].shape[0], 1, 40, generator=torch.Generator().manual_seed(1))
    asked = {**inputs, "input_values": sound, "max_new_tokens": 8, "do_sample": False, "guidance_scale": 2.0}
    torch.testing.assert_close(unspool.generate(model, **asked), model.generate(**asked))


def test_without_a_text() -> None:
    model = make_unlike("musicgen")
    asked = {**model.get_unconditional_inputs(2), "max_new_tokens": 9, "do_sample": False}
    torch.testing.assert_close(unspool.generate(model, **asked), model.generate(**asked))


def test_draws_follow_the_seed() -> None:
    model, inputs = make_unlike("musicgen"), find_inputs()
    asked = {**inputs, "max_new_tokens": 9, "do_sample": True, "guidance_scale": 2.0}
    first, again, other = (unspool.generate(model, **asked, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_outputs_and_attachment() -> None:
    model, inputs = make_unlike("musicgen"), find_inputs()
    asked = {**inputs, "max_new_tokens": 9, "do_sample": False, "guidance_scale": 2.0}
    plain = unspool.generate(model, **asked)
    output = unspool.generate(model, **asked, return_dict_in_generate=True, output_scores=True)
    assert torch.equal(output.sequences, plain)
    rows = inputs["input_ids"].shape[0] * model.decoder.num_codebooks
    assert [tuple(scores.shape) for scores in output.scores] == [(rows, 32)] * 9
    try:
        assert torch.equal(unspool.attach(model).generate(**asked), plain)
    finally:
        unspool.detach(model)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"num_beams": 2}, UnsupportedError),
        ({"num_return_sequences": 2, "do_sample": True}, UnsupportedError),
        ({"prompt_lookup_num_tokens": 2}, UnsupportedError),
        ({"eos_token_id": 3}, SettingError),
        ({"max_length": 1}, SettingError),
        ({"repetition_penalty": 1.5}, SettingError),
        ({"cache_implementation": "static"}, UnsupportedError),
    ],
    ids=str,
)
def test_what_codebooks_can_not_have(settings: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        unspool.generate(make_unlike("musicgen"), **find_inputs(), **{"max_new_tokens": None, **settings})


def test_settings_of_its_config() -> None:
    config = make_unlike("musicgen").config
    made = unspool.GenerationConfig.from_model_config(config)
    assert isinstance(made, unspool.GenerationConfig)
    assert isinstance(config, transformers.MusicgenConfig)
