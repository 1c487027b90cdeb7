"""What was merged of late is merged no more, and nobody can tell."""

from __future__ import annotations

import pytest

from unspool.config import GenerationConfig
from unspool.errors import SettingError
from unspool.plan.origins import merge


def test_equal_layers_give_configs_of_their_own() -> None:
    model = GenerationConfig(temperature=0.7, do_sample=True)
    first, origins = merge(model, None, {"top_k": 5}, {"max_new_tokens": 9})
    first.top_k, origins["top_k"] = 6, "model"
    if first.generation_kwargs is not None:
        first.generation_kwargs["a"] = 1
    again, told = merge(model, None, {"top_k": 5}, {"max_new_tokens": 9})
    assert (again.top_k, again.temperature, again.max_new_tokens) == (5, 0.7, 9)
    assert told["top_k"] == "call" and told["temperature"] == "model" and not again.generation_kwargs


def test_values_that_are_equal_and_of_another_type_are_checked() -> None:
    merge(None, None, {"do_sample": True, "top_k": 1})
    with pytest.raises(SettingError):
        merge(None, None, {"do_sample": 1, "top_k": 1})
    with pytest.raises(SettingError):
        merge(None, None, {"do_sample": True, "top_k": True})


def test_a_model_config_that_changes_is_read_again() -> None:
    model = GenerationConfig(temperature=0.7, do_sample=True)
    assert merge(model, None, {})[0].temperature == 0.7
    model.temperature = 0.9
    assert merge(model, None, {})[0].temperature == 0.9
