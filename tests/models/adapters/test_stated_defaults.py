"""Settings of transformers whose value is a default's: one that was stated counts, one that nobody set does not."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from tests.models.adapters.tiny import make_once

import unspool
from unspool.config import PARAMETERS
from unspool.models.registry import build_model
from unspool.models.sharing import SharedSource

transformers = pytest.importorskip("transformers")

IDS = torch.tensor([[5, 6, 7, 5, 6, 7, 5, 6], [9, 8, 7, 9, 8, 7, 9, 8]])
DRAW = {"do_sample": True}
BEAMS = {"num_beams": 3}
# What the model's own settings say, where the call's config states the default; and what else both say.
STATED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "do_sample": ({"do_sample": True, "temperature": 5.0}, {}),
    "num_beams": ({"num_beams": 4}, {}),
    "temperature": ({"temperature": 0.01}, DRAW),
    "top_k": ({"top_k": 1}, DRAW),
    "top_p": ({"top_p": 0.01}, DRAW),
    "typical_p": ({"typical_p": 0.01}, DRAW),
    "epsilon_cutoff": ({"epsilon_cutoff": 0.5}, DRAW),
    "eta_cutoff": ({"eta_cutoff": 0.5}, DRAW),
    "repetition_penalty": ({"repetition_penalty": 9.0}, {}),
    "no_repeat_ngram_size": ({"no_repeat_ngram_size": 1}, {}),
    "length_penalty": ({"length_penalty": -9.0}, BEAMS),
    "early_stopping": ({"early_stopping": True}, BEAMS),
    "num_return_sequences": ({"num_return_sequences": 3}, BEAMS),
    "min_length": ({"min_length": 16}, {}),
    "use_cache": ({"use_cache": False}, {}),
    "remove_invalid_values": ({"remove_invalid_values": True}, {}),
    "return_dict_in_generate": ({"return_dict_in_generate": True}, {}),
    "output_scores": ({"output_scores": True}, {"return_dict_in_generate": True}),
}
DEFAULTS = transformers.GenerationConfig._get_default_generation_params()
END = 31  # a token that greedy texts of the model come to


@cache
def make_model() -> Any:
    return make_once("llama")


@cache
def make_native() -> Any:
    model = make_model()
    return build_model(
        {**model.config.to_dict(), "architectures": ["LlamaForCausalLM"]},
        SharedSource({name: value.clone() for name, value in model.state_dict().items()}),
        device=torch.device("cpu"),
        dtype=torch.float32,
    )


def set_up(name: str) -> tuple[Any, Any]:
    """A model whose own settings say something, and a config that states the default."""
    own, both = STATED[name]
    if "do_sample" in both:  # the scores that are drawn from are compared, for draws are another generator's
        both = {**both, "return_dict_in_generate": True, "output_scores": True}
    model = copy.copy(make_model())
    special = {"pad_token_id": 0, "eos_token_id": END, "max_new_tokens": 5}
    model.generation_config = transformers.GenerationConfig(**{**special, **both, **own})
    return model, transformers.GenerationConfig(**both, **{name: DEFAULTS[name]})


def same(found: Any, expected: Any) -> bool:
    assert isinstance(found, torch.Tensor) == isinstance(expected, torch.Tensor)
    if isinstance(found, torch.Tensor):
        return torch.equal(found, expected)
    assert (found.scores is None) == (expected.scores is None)
    if found.scores is not None:
        return torch.allclose(found.scores[0], expected.scores[0], atol=1e-4)
    return torch.equal(found.sequences, expected.sequences)


def test_every_setting_with_a_default_is_here() -> None:
    others = {"max_length", "encoder_no_repeat_ngram_size", "encoder_repetition_penalty"}  # with tests of their own
    others |= {"num_beam_groups", "diversity_penalty"}  # of what transformers left
    others |= {"assistant_confidence_threshold", "assistant_lookbehind", "target_lookbehind"}  # of draft models
    others |= {"num_assistant_tokens", "num_assistant_tokens_schedule"}
    assert set(STATED) == {name for name, value in DEFAULTS.items() if value is not None} - others


@pytest.mark.parametrize("name", STATED)
def test_a_default_that_was_stated_counts_as_in_transformers(name: str) -> None:
    model, config = set_up(name)
    expected = model.generate(IDS, generation_config=config)
    changed = copy.deepcopy(model.generation_config)
    setattr(changed, name, DEFAULTS[name])
    assert same(unspool.generate(model, IDS, generation_config=config), expected)
    assert same(unspool.generate(model, IDS, generation_config=changed, native=False), expected)
    core = make_native()
    held = {key: value for key, value in model.generation_config.to_diff_dict().items() if key in PARAMETERS}
    core.generation_config = unspool.GenerationConfig(**held)
    assert same(unspool.generate(core, IDS, generation_config=copy.deepcopy(config)), expected)


def test_attached_objects_and_pipelines_follow_what_was_stated() -> None:
    model, config = set_up("do_sample")
    attached = unspool.attach(model)
    expected = model.__class__.generate(model, IDS, generation_config=config)
    assert same(attached.generate(IDS, generation_config=config), expected)
    drawn = attached.generate(IDS)
    assert not same(attached.generate(IDS), drawn)  # the model's own settings are what they were
    prepared, _ = model._prepare_generation_config(config)  # as a pipeline keeps it: every default is filled in
    model.generation_config.num_beams = 4
    assert same(attached.generate(IDS, generation_config=prepared), expected)


def test_what_nobody_set_is_the_models() -> None:
    model, _ = set_up("num_beams")
    expected = model.generate(IDS)
    for config in (transformers.GenerationConfig(), transformers.GenerationConfig(num_beams=None, top_p=None)):
        assert same(unspool.generate(model, IDS, generation_config=config), expected)


class GenerationConfig:
    """A config as transformers had it before 5.0: defaults are filled in, and what differs from them is its diff."""

    def __init__(self, **settings: Any) -> None:
        self.__dict__.update({**DEFAULTS, **settings})

    def to_diff_dict(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if DEFAULTS.get(name) != value}


GenerationConfig.__module__ = "transformers.generation.configuration_utils"


def test_a_default_of_releases_before_5_counts_as_not_set() -> None:
    model, _ = set_up("num_beams")
    settings = {"repetition_penalty": 1.5, "num_beams": 1, "do_sample": False}
    expected = unspool.generate(model, IDS, repetition_penalty=1.5)
    assert same(unspool.generate(model, IDS, generation_config=GenerationConfig(**settings)), expected)
    greedy = unspool.generate(model, IDS, repetition_penalty=1.5, num_beams=1)
    assert same(unspool.generate(model, IDS, generation_config=GenerationConfig(**settings), num_beams=1), greedy)
