"""From settings to a plan: who wins, who set what, lengths, and values for each row."""

from __future__ import annotations

from typing import Any

import pytest
from tests.plan.examples import COMPANIONS, EXAMPLES
from tests.plan.plans import INFO, SHAPE, SPOKEN, assign, plan_for

from unspool import GenerationConfig, WatermarkingConfig
from unspool.api.answer import FRIENDLY_DEFAULTS
from unspool.config import PARAMETERS
from unspool.config.structures import STRUCTURES
from unspool.errors import InputError, SettingError
from unspool.plan import PromptShape, as_token_ids, merge, settle
from unspool.protocols import ModelInfo

# --- who wins -----------------------------------------------------------------------------------------------


def test_the_later_layer_wins_and_is_known() -> None:
    of_model = assign(temperature=0.1, top_k=1, top_p=0.1)
    config = assign(temperature=0.2, top_k=2)
    settings, origins = merge(of_model, config, {"temperature": 0.3}, {"seed": 4})
    assert (settings.temperature, settings.top_k, settings.top_p, settings.seed) == (0.3, 2, 0.1, 4)
    assert [origins[name] for name in ("temperature", "top_k", "top_p", "seed")] == [
        "call",
        "config",
        "model",
        "default",
    ]
    assert {origins[name] for name in PARAMETERS if name not in ("temperature", "top_k", "top_p")} == {"default"}
    assert set(origins) == set(PARAMETERS)


def test_setting_a_default_is_setting_it() -> None:
    """A config that names a default overrides the model's file; one that does not leaves it alone."""
    of_model = assign(top_k=7, max_length=9)
    settings, origins = merge(of_model, GenerationConfig(top_k=50), {})
    assert (settings.top_k, origins["top_k"]) == (50, "config")
    assert (settings.max_length, origins["max_length"]) == (9, "model")
    settings, origins = merge(of_model, None, {"top_k": None})
    assert (settings.top_k, origins["top_k"]) == (None, "call")


def test_merging_changes_no_layer() -> None:
    of_model, config = assign(top_k=7), assign(top_k=8)
    merge(of_model, config, {"top_k": 9})
    assert (of_model.top_k, config.top_k) == (7, 8)


def test_the_plan_is_settled() -> None:
    plan = plan_for(do_sample=True, seed=[1, 2], eos_token_id=[3, 4], max_new_tokens=7, num_return_sequences=3)
    assert (plan.do_sample, plan.seeds, plan.eos_token_ids, plan.pad_token_id) == (True, (1, 2), (3, 4), 3)
    assert (plan.max_length, plan.max_new_tokens, plan.num_return_sequences) == (12, 7, 3)
    assert plan.cache_kind == "dynamic"
    assert plan.asked == {"do_sample", "seed", "eos_token_id", "max_new_tokens", "num_return_sequences"}
    assert plan_for("model", max_length=9).asked == frozenset()
    with pytest.raises(AttributeError):
        plan.max_length = 5


@pytest.mark.parametrize(
    ("settings", "pad"),
    [
        ({"pad_token_id": 5}, 5),
        ({"pad_token_id": 5, "eos_token_id": 6}, 5),
        ({"eos_token_id": [6, 7]}, 6),
        ({"eos_token_id": [-1, 7]}, 7),
        ({}, 0),
    ],
)
def test_padding_is_decided(settings: dict[str, Any], pad: int) -> None:
    assert plan_for(**settings).pad_token_id == pad


def test_token_ids_of_any_form() -> None:
    import numpy
    import torch

    for value in (5, [5], (5,), torch.tensor([5]), torch.tensor(5), numpy.int64(5)):
        assert as_token_ids(value, "eos_token_id", INFO) == (5,)
    assert as_token_ids(None, "eos_token_id", INFO) == ()
    with pytest.raises(SettingError, match="`eos_token_id`=23 is outside the model's vocabulary of 23"):
        as_token_ids([1, 23], "eos_token_id", INFO)


# --- length and context -------------------------------------------------------------------------------------


def test_friendly_defaults_replace_a_files_max_length_only() -> None:
    """The short way writes up to 256 tokens: a length that the model's file was saved with is no request."""

    def length(of_model: dict[str, Any], **call: Any) -> int:
        layers = merge(assign(**of_model), None, call, FRIENDLY_DEFAULTS)
        return settle(*layers, INFO, SHAPE).max_new_tokens

    assert length({}) == 256
    assert length({"max_length": 20}) == 256
    assert length({"max_new_tokens": 9}) == 9
    assert length({"max_length": 20}, max_length=12) == 7
    assert length({"max_length": 20}, max_new_tokens=3) == 3


@pytest.mark.parametrize("origin", ["call", "config", "model"])
def test_a_limit_below_the_prompt_is_refused(origin: str) -> None:
    with pytest.raises(SettingError) as error:
        plan_for(origin, max_length=5)
    assert "the prompt has 5 tokens and `max_length` is 5" in str(error.value)
    assert SPOKEN[origin] in str(error.value) and "max_new_tokens" in str(error.value)


def test_a_generation_needs_an_end() -> None:
    with pytest.raises(SettingError, match="needs an end"):
        plan_for(max_length=None)


SMALL = ModelInfo("fake", 23, 4, 1, 1, max_context=12)


@pytest.mark.parametrize("origin", ["call", "config"])
@pytest.mark.parametrize(("name", "value", "new"), [("max_new_tokens", 8, 8), ("max_length", 13, 8)])
def test_more_than_the_context_is_refused_when_asked_for(origin: str, name: str, value: int, new: int) -> None:
    with pytest.raises(
        SettingError, match=f"`{name}` asks for {new} new tokens after a prompt of 5.*max_new_tokens=7` fit"
    ):
        plan_for(origin, info=SMALL, **{name: value})
    assert plan_for(origin, info=SMALL, **{name: value - 1}).max_new_tokens == 7


def test_a_default_is_cut_at_the_context() -> None:
    assert plan_for(info=SMALL).max_new_tokens == 7
    assert plan_for("model", info=SMALL, max_length=500).max_new_tokens == 7
    assert plan_for(info=SMALL, max_new_tokens=None).max_new_tokens == 7  # None asks for nothing
    assert settle(*merge(None, None, {}, FRIENDLY_DEFAULTS), SMALL, SHAPE).max_new_tokens == 7


def test_padding_takes_no_context() -> None:
    padded = PromptShape(num_rows=2, width=40, longest=5)
    assert plan_for(info=SMALL, shape=padded, max_new_tokens=7).max_length == 47


def test_a_prompt_as_long_as_the_context() -> None:
    with pytest.raises(InputError, match="the prompt has 12 tokens and the model's context ends at 12"):
        plan_for(info=SMALL, shape=PromptShape(1, 12, 12), max_new_tokens=1)


# --- per row ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name, one in PARAMETERS.items() if one.may_be_per_row])
def test_a_value_a_row_needs_as_many_as_there_are_prompts(name: str) -> None:
    values = {"seed": 1, "top_k": 3, "min_length": 1, "min_new_tokens": 1, "max_thinking_tokens": 1}
    values |= {"watermarking_config": WatermarkingConfig()}
    value = values.get(name, EXAMPLES[name] if name in STRUCTURES else 0.5)
    extra = {"do_sample": True, "num_return_sequences": 2} | COMPANIONS.get(name, {})
    for num in (1, 3, 4):  # not the number of sequences either
        with pytest.raises(SettingError, match=f"`{name}` has {num} values for 2 prompts"):
            plan_for(**extra, **{name: [value] * num})
    assert getattr(plan_for(**extra, **{name: [value] * 2}).settings, name) == [value] * 2


def test_rows_are_bounded() -> None:
    with pytest.raises(SettingError, match="`num_return_sequences`=40000 for 2 prompts makes 80000 rows"):
        plan_for(do_sample=True, num_return_sequences=40_000)
    with pytest.raises(SettingError, match="`num_beams`=40000 for 2 prompts makes 80000 rows"):
        plan_for(num_beams=40_000)
