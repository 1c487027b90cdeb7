from __future__ import annotations

import contextlib
import copy
import json
import logging
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from unspool.config import (
    PARAMETERS,
    GenerationConfig,
    GenerationMode,
)
from unspool.config.hosted import FOREIGN
from unspool.config.parameters import find_own
from unspool.errors import SettingError

# The reference's defaults at 4.52.4, where 5.x keeps None and fills them in at the call.
DEFAULTS_4_52 = {
    "max_length": 20,
    "min_length": 0,
    "early_stopping": False,
    "do_sample": False,
    "num_beams": 1,
    "num_beam_groups": 1,
    "use_cache": True,
    "temperature": 1.0,
    "top_k": 50,
    "top_p": 1.0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "diversity_penalty": 0.0,
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "length_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "renormalize_logits": False,
    "remove_invalid_values": False,
    "token_healing": False,
    "num_return_sequences": 1,
    "output_attentions": False,
    "output_hidden_states": False,
    "output_scores": False,
    "return_dict_in_generate": False,
    "encoder_no_repeat_ngram_size": 0,
    "num_assistant_tokens": 20,
    "num_assistant_tokens_schedule": "constant",
    "assistant_confidence_threshold": 0.4,
    "assistant_lookbehind": 10,
    "target_lookbehind": 10,
    "disable_compile": False,
    "generation_kwargs": {},
    "keep_stop_strings": False,
}
DEFAULTS_OF_OURS = {
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty_ignores_prompt": False,
    "dry_multiplier": 0.0,
    "dry_base": 1.75,
    "dry_allowed_length": 2,
    "top_a": 0.0,
    "xtc_probability": 0.0,
    "xtc_threshold": 0.1,
    "mirostat_eta": 0.1,
    "dynatemp_range": 0.0,
    "dynatemp_exponent": 1.0,
    "return_beam_trace": False,
    "strict_constraints": False,
}


def test_defaults_are_those_of_the_table() -> None:
    config = GenerationConfig()
    for name in PARAMETERS:
        assert getattr(config, name) == (DEFAULTS_4_52 | DEFAULTS_OF_OURS).get(name), name
    assert config.explicit == frozenset()
    assert repr(config) == "GenerationConfig {}\n"


def test_every_setting_the_reference_still_has_is_here() -> None:
    theirs = set(transformers.GenerationConfig().to_dict())
    assert theirs - {"transformers_version", "_from_model_config"} <= {*PARAMETERS, *FOREIGN}
    known_defaults = transformers.GenerationConfig._get_default_generation_params()
    for name, value in known_defaults.items():
        assert PARAMETERS[name].default == value, name


def test_table_reads_what_a_person_types() -> None:
    read = {name: parameter.parse for name, parameter in PARAMETERS.items()}
    assert read["temperature"]("0.3") == 0.3
    assert read["temperature"]("[0.3, 1]") == [0.3, 1]
    assert read["do_sample"]("true") is True
    assert read["do_sample"]("Off") is False
    assert read["early_stopping"]("never") == "never"
    assert read["early_stopping"]("yes") is True
    assert read["stop_strings"]("###") == "###"
    assert read["stop_strings"]('["a", "b"]') == ["a", "b"]
    assert read["eos_token_id"]("[1, 2]") == [1, 2]
    assert read["dola_layers"]("high") == "high"
    assert read["cache_implementation"]("static") == "static"
    assert read["seed"]("none") is None
    with pytest.raises(SettingError, match="temperature"):
        read["temperature"]("warm")
    assert all(parameter.help for parameter in PARAMETERS.values())
    assert list(PARAMETERS)[-len(find_own()) :] == list(find_own())  # theirs come first


def test_what_was_set_is_known() -> None:
    config = GenerationConfig(temperature=1.0, top_k=None, foo="bar")
    assert config.explicit == {"temperature", "top_k", "foo"}
    config.do_sample = False
    assert config.update(num_beams=1, nothing=2) == {"nothing": 2}
    assert config.explicit == {"temperature", "top_k", "foo", "do_sample", "num_beams"}
    for twin in (copy.copy(config), copy.deepcopy(config)):
        assert twin == config
        assert twin.explicit == config.explicit
        twin.max_length = 7
        assert config.max_length == 20
        assert "max_length" not in config.explicit
    assert GenerationConfig.from_dict({"top_p": 1.0}).explicit == {"top_p"}
    assert GenerationConfig.from_model_config({"eos_token_id": 3, "hidden_size": 8}).explicit == {"eos_token_id"}


def test_lists_in_defaults_are_not_shared() -> None:
    config = GenerationConfig()
    config.generation_kwargs["a"] = 1
    assert GenerationConfig().generation_kwargs == {}
    assert PARAMETERS["generation_kwargs"].default == {}


def test_printing_shows_what_differs() -> None:
    config = GenerationConfig(bos_token_id=0, do_sample=False)
    assert repr(config) == 'GenerationConfig {\n  "bos_token_id": 0\n}\n'
    assert "<object object" in repr(GenerationConfig(constraints=[object()], num_beams=2))


def test_from_model_config() -> None:
    model_config = transformers.GPT2Config(eos_token_id=9, bos_token_id=8)
    config = GenerationConfig.from_model_config(model_config)
    assert (config.eos_token_id, config.bos_token_id, config.max_length) == (9, 8, 20)
    assert config != GenerationConfig()
    assert "n_embd" not in config.to_dict()
    nested = {"pad_token_id": 1, "seed": "abc", "decoder": {"pad_token_id": 2, "decoder_start_token_id": 3}}
    config = GenerationConfig.from_model_config(nested)
    assert (config.pad_token_id, config.decoder_start_token_id, config.seed) == (1, 3, None)
    config = GenerationConfig.from_model_config({"output_attentions": True})
    assert config.return_dict_in_generate is True
    config = GenerationConfig.from_model_config({"bos_token_id": 4, "force_bos_token_to_be_generated": True})
    assert config.forced_bos_token_id == 4


def test_dict_forms() -> None:
    config = GenerationConfig(top_k=3, do_sample=True, torch_dtype=torch.float16, deep={"torch_dtype": torch.int8})
    whole = config.to_dict()
    assert whole["torch_dtype"] == "float16"
    assert whole["deep"] == {"torch_dtype": "int8"}
    assert whole["max_length"] == 20
    assert set(config.to_diff_dict()) == {"top_k", "do_sample", "torch_dtype", "deep"}
    assert json.loads(config.to_json_string(use_diff=False)) == whole
    assert GenerationConfig.from_dict(whole) == config
    assert GenerationConfig(top_k=np.int64(3), do_sample=True) == GenerationConfig(top_k=3, do_sample=True)


@pytest.mark.parametrize(
    ("settings_", "mode"),
    [
        ({}, "greedy_search"),
        ({"do_sample": True}, "sample"),
        ({"num_beams": 2}, "beam_search"),
        ({"num_beams": 2, "do_sample": True}, "beam_sample"),
        ({"num_beams": 2, "num_beam_groups": 2, "diversity_penalty": 0.5}, "group_beam_search"),
        ({"num_beams": 2, "force_words_ids": [[1]]}, "constrained_beam_search"),
        ({"top_k": 10, "penalty_alpha": 0.6}, "contrastive_search"),
        ({"dola_layers": "high", "repetition_penalty": 1.2}, "dola_generation"),
        ({"prompt_lookup_num_tokens": 3}, "assisted_generation"),
        ({"assistant_early_exit": 3}, "assisted_generation"),
    ],
)
def test_modes(settings_: dict[str, Any], mode: str) -> None:
    assert GenerationConfig(**settings_).get_generation_mode() == mode == GenerationMode(mode)


def test_modes_with_an_assistant() -> None:
    assert GenerationConfig().get_generation_mode(assistant_model="foo") == GenerationMode.ASSISTED_GENERATION
    with pytest.raises(SettingError, match="beam_search"):
        GenerationConfig(num_beams=2).get_generation_mode(assistant_model="foo")


IMPOSSIBLE: list[tuple[dict[str, Any], str]] = [
    ({"early_stopping": "always"}, "early_stopping"),
    ({"early_stopping": 1}, "early_stopping"),
    ({"early_stopping": [True]}, "early_stopping"),
    ({"max_new_tokens": 0}, "greater than 0"),
    ({"max_new_tokens": -3}, "greater than 0"),
    ({"do_sample": False, "num_beams": 1, "num_return_sequences": 2}, "Greedy methods"),
    ({"num_beams": 2, "num_return_sequences": 3}, "num_return_sequences"),
    ({"num_beams": 2, "do_sample": True, "constraints": ["one"]}, "constrained beam search"),
    ({"num_beams": 2, "do_sample": True, "force_words_ids": [[1]]}, "constrained beam search"),
    ({"num_beams": 2, "num_beam_groups": 2, "force_words_ids": [[1]]}, "constrained beam search"),
    ({"num_beams": 2, "num_beam_groups": 2}, "diversity_penalty"),
    ({"num_beams": 2, "num_beam_groups": 2, "diversity_penalty": 1.0, "do_sample": True}, "group beam search"),
    ({"cache_implementation": "cupboard"}, "cache_implementation"),
    ({"cache_implementation": "dynamic", "cache_config": {}}, "cache_config"),
    ({"cache_config": {"nbits": 4}}, "cache_config"),
    ({"compile_config": {"mode": "default"}}, "compile_config"),
    ({"watermarking_config": 3}, "watermarking_config"),
    ({"watermarking_config": {"seeding_scheme": "righthash"}}, "seeding_scheme"),
    ({"watermarking_config": {"greenlist_ratio": 1.5}}, "greenlist_ratio"),
    ({"watermarking_config": {"colour": "green"}}, "colour"),
    ({"logits_processor": "foo"}, "logits_processor"),
    ({"stopping_criteria": None}, "stopping_criteria"),
    ({"assistant_model": "foo"}, "assistant_model"),
    ({"temperature": float("nan")}, "temperature"),
    ({"temperature": float("inf")}, "temperature"),
    ({"temperature": "warm"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": [0.5, float("nan")]}, "temperature"),
    ({"temperature": []}, "temperature"),
    ({"top_p": 10**400}, "top_p"),
    ({"top_k": 1.5}, "top_k"),
    ({"top_k": -1}, "top_k"),
    ({"top_k": [1] * 100_000}, "top_k"),
    ({"length_penalty": [0.1]}, "length_penalty"),
    ({"do_sample": "yes"}, "do_sample"),
    ({"seed": -1}, "seed"),
    ({"seed": 2**63}, "seed"),
    ({"seed": [1, 2.0]}, "seed"),
    ({"logprobs": 1025}, "logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"max_cache_len": 0}, "max_cache_len"),
    ({"max_time": float("inf")}, "max_time"),
    ({"stop_strings": ["a", ""]}, "stop_strings"),
    ({"stop_strings": ["a"] * 257}, "stop_strings"),
    ({"stop_strings": 3}, "stop_strings"),
    ({"eos_token_id": [1, None]}, "eos_token_id"),
    ({"eos_token_id": 2**40}, "eos_token_id"),
    ({"bad_words_ids": [1, 2]}, "bad_words_ids"),
    ({"bad_words_ids": [[]]}, "bad_words_ids"),
    ({"bad_words_ids": [[[1]]]}, "bad_words_ids"),
    ({"sequence_bias": {(1,): float("nan")}}, "sequence_bias"),
    ({"sequence_bias": [[[1], "2"]]}, "sequence_bias"),
    ({"exponential_decay_length_penalty": (1,)}, "exponential_decay_length_penalty"),
    ({"dola_layers": "middle"}, "`dola_layers` must be 'low', 'high' or a list of layer indices"),
    ({"dola_layers": [0.5]}, "`dola_layers` must be made of layer indices, but is 0.5"),
    ({"dola_layers": [1, True]}, "`dola_layers` must be made of layer indices, but is True"),
    ({"dola_layers": [2**40]}, "`dola_layers` must be made of layer indices"),
    ({"num_assistant_tokens_schedule": "sometimes"}, "num_assistant_tokens_schedule"),
    ({"constraints": "abc"}, "constraints"),
    ({"forced_eos_token_id": [5, 6], "suppress_tokens": [4, 5, 6]}, "forced_eos_token_id"),
    ({"forced_bos_token_id": 5, "suppress_tokens": [5]}, "forced_bos_token_id"),
    ({"generation_kwargs": [1]}, "generation_kwargs"),
    ({"validate": 3}, "validate"),
    ({"explicit": 3}, "explicit"),
]


@pytest.mark.parametrize(("settings_", "named"), IMPOSSIBLE, ids=str)
def test_what_cannot_be_is_refused(settings_: dict[str, Any], named: str) -> None:
    with pytest.raises(SettingError, match=named):
        GenerationConfig(**settings_)
    if set(settings_) <= set(PARAMETERS):
        config = GenerationConfig(max_length=9)
        with pytest.raises(ValueError, match=named):
            config.update(**settings_)
        assert config == GenerationConfig(max_length=9)
        assert config.explicit == {"max_length"}


@pytest.mark.parametrize(
    "settings_",
    [
        {"forced_decoder_ids": [[1, None], [2, 50359]], "suppress_tokens": [], "begin_suppress_tokens": [220, 50257]},
        {"cache_implementation": "static"},
        {"cache_implementation": "quantized", "cache_config": {"nbits": 4}},
        {"do_sample": True, "temperature": [0.5, 1.0], "top_k": [0, 5], "top_p": (0.5, 1.0), "seed": [1, 2]},
        {"eos_token_id": -1, "decoder_start_token_id": [1, 2]},
        {"force_words_ids": [[[1, 2], [3]], [4]], "num_beams": 2},
        {"dola_layers": [2, 4]},
        {"sequence_bias": [[[45, 67], -0.6]], "no_repeat_ngram_size": 3},
        {"logprobs": 0, "prompt_logprobs": 1024, "max_cache_len": 7, "keep_stop_strings": True},
        {"early_stopping": "never", "num_beams": 4, "length_penalty": 2.0},
        dict.fromkeys(PARAMETERS),
    ],
)
def test_what_models_ship_is_accepted(settings_: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    config = GenerationConfig(**settings_)
    assert {name: getattr(config, name) for name in settings_} == settings_
    assert caplog.records == []
    config.get_generation_mode()


NO_EFFECT: list[tuple[dict[str, Any], str]] = [
    ({"temperature": 0.5}, "temperature"),
    ({"temperature": [1.0, 0.5]}, "temperature"),
    ({"top_p": 0.5, "do_sample": False}, "top_p"),
    ({"top_k": 3}, "top_k"),
    ({"min_p": 0.1}, "min_p"),
    ({"typical_p": 0.5}, "typical_p"),
    ({"epsilon_cutoff": 0.1}, "epsilon_cutoff"),
    ({"eta_cutoff": 0.1}, "eta_cutoff"),
    ({"early_stopping": True}, "early_stopping"),
    ({"length_penalty": 2.0}, "length_penalty"),
    ({"num_beam_groups": 2}, "num_beam_groups"),
    ({"diversity_penalty": 0.5}, "diversity_penalty"),
    ({"constraints": ["one"]}, "constraints"),
    ({"use_cache": False, "cache_implementation": "static"}, "cache_implementation"),
    ({"output_scores": True}, "output_scores"),
    ({"output_logits": True, "return_dict_in_generate": False}, "output_logits"),
    ({"pad_token_id": -1}, "pad_token_id"),
]


@pytest.mark.parametrize(("settings_", "named"), NO_EFFECT, ids=str)
def test_what_has_no_effect_is_logged_or_raised(
    settings_: dict[str, Any], named: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "unspool.config"):
        config = GenerationConfig(**settings_)
    assert [record.name for record in caplog.records] == ["unspool.config"]
    message = caplog.records[0].getMessage()
    assert named in message
    assert len(message) < 150
    with pytest.raises(SettingError, match=f"`{named}`"):
        config.validate(strict=True)


def test_a_finding_goes_when_its_cause_goes(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "unspool.config"):
        config = GenerationConfig(do_sample=False, temperature=0.5)
        assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
        assert "`0.5`" in caplog.records[1].getMessage()
        for value in (1.0, None):
            caplog.clear()
            config.update(temperature=value)
            assert caplog.records == []
        GenerationConfig(foo="bar")
        GenerationConfig(top_k=4, penalty_alpha=0.6)
    assert caplog.records == []
    config.validate(strict=True)


@settings(max_examples=100)
@given(
    name=st.sampled_from(sorted(PARAMETERS)),
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
        max_leaves=8,
    ),
)
def test_any_value_is_taken_or_refused_in_our_words(name: str, value: Any) -> None:
    try:
        config = GenerationConfig(**{name: value})
    except SettingError as error:
        assert len(str(error)) < 1000
        return
    assert config.explicit == {name}
    repr(config)
    assert GenerationConfig.from_dict(json.loads(config.to_json_string())) == config
    with contextlib.suppress(SettingError):
        config.get_generation_mode()


@pytest.mark.parametrize(
    "settings_",
    [
        {"eos_token_id": 2},
        {"eos_token_id": [2, 3]},
        {"max_new_tokens": 4, "top_k": 3, "do_sample": True, "temperature": 0.5},
        {"suppress_tokens": [5]},
        {"bad_words_ids": [[5, 6]]},
        {"force_words_ids": [[5]], "num_beams": 2},
        {"watermarking_config": {"bias": 1.5, "hashing_key": 7}},
        {"watermarking_config": {"ngram_len": 3, "keys": [4, 5]}},
    ],
)
def test_numbers_of_numpy_and_torch_are_python_s(settings_: dict[str, Any]) -> None:
    def convert(value: Any, make: Any) -> Any:
        return {name: convert(one, make) for name, one in value.items()} if isinstance(value, dict) else make(value)

    plain = GenerationConfig(**settings_)
    for make in (np.asarray, torch.tensor):
        config = GenerationConfig(**convert(settings_, make))
        assert config == plain
        for name in settings_:
            assert type(getattr(config, name)) is type(getattr(plain, name))
    listed = GenerationConfig(eos_token_id=[torch.tensor(2), torch.tensor(3)])
    assert listed == GenerationConfig(eos_token_id=[2, 3])
