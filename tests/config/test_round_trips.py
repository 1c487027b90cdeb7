"""What was set stays set: configs that are copied, written and read again behave as the first one does."""

from __future__ import annotations

import copy
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.copies import copy_by_pickle

from unspool import GenerationConfig
from unspool.config.parameters import PARAMETERS
from unspool.errors import SettingError
from unspool.plan.origins import merge

VALUES: dict[str, list[Any]] = {
    "max_new_tokens": [8, None],
    "eos_token_id": [None, 2, [2, 3]],
    "pad_token_id": [None, 0],
    "num_beams": [1, 3],
    "do_sample": [True, False],
    "top_k": [50, None, 0, 7],
    "temperature": [1.0, 0.5],
    "stop_strings": [None, ["a"]],
    "sequence_bias": [None, {(4, 5): -1.5}],
    "seed": [None, 3],
    "watermarking_config": [None, {"bias": 1.5}],
    "mine": [None, 3, {"deep": [1]}],
}
SETTINGS = st.dictionaries(st.sampled_from(sorted(VALUES)), st.integers(0, 2)).map(
    lambda chosen: {name: VALUES[name][place % len(VALUES[name])] for name, place in chosen.items()}
)
MODEL = GenerationConfig(eos_token_id=9, num_beams=4, top_k=5, stop_strings=["b"], pad_token_id=1)


def save_and_load(config: GenerationConfig, use_diff: bool) -> GenerationConfig:
    with tempfile.TemporaryDirectory() as folder:
        config.to_json_file(Path(folder) / "generation_config.json", use_diff=use_diff)
        loaded: GenerationConfig = GenerationConfig.from_pretrained(folder)
        return loaded


def behave(config: GenerationConfig) -> tuple[str, dict[str, str]]:
    """What a call gets, and who set it."""
    known = {name: value for name, value in vars(config).items() if name in config.explicit and name in PARAMETERS}
    merged, origins = merge(MODEL, GenerationConfig(**known), {})
    return merged.to_json_string(use_diff=False, ignore_metadata=True), dict(origins)


@settings(max_examples=30)
@given(chosen=SETTINGS)
def test_what_was_set_survives_every_round_trip(chosen: dict[str, Any]) -> None:
    config = GenerationConfig(**chosen)
    twins = [
        GenerationConfig.from_dict(config.to_dict()),
        GenerationConfig.from_dict(config.to_diff_dict()),
        GenerationConfig.from_dict(json.loads(config.to_json_string())),
        GenerationConfig.from_dict(json.loads(config.to_json_string(use_diff=False))),
        save_and_load(config, True),
        save_and_load(config, False),
        copy.copy(config),
        copy.deepcopy(config),
        copy_by_pickle(config),
    ]
    for place, twin in enumerate(twins):
        assert twin.explicit == config.explicit == set(chosen), place
        assert (twin == config, hash(twin) == hash(config)) == (True, True), place
        assert behave(twin) == behave(config), place


@settings(max_examples=100)
@given(one=SETTINGS, other=SETTINGS)
def test_equal_configs_behave_equally(one: dict[str, Any], other: dict[str, Any]) -> None:
    first, second = GenerationConfig(**one), GenerationConfig(**other)
    if first == second:
        assert hash(first) == hash(second) and behave(first) == behave(second)


def test_a_none_that_was_set_keeps_the_models_value_out(tmp_path: Path) -> None:
    config = GenerationConfig(max_new_tokens=8, eos_token_id=None)
    assert config != GenerationConfig(max_new_tokens=8)
    config.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "generation_config.json").read_text()) == {"max_new_tokens": 8, "eos_token_id": None}
    loaded = GenerationConfig.from_pretrained(tmp_path)
    merged, origins = merge(MODEL, loaded, {})
    assert (merged.eos_token_id, origins["eos_token_id"]) == (None, "config")
    merged, origins = merge(MODEL, GenerationConfig(max_new_tokens=8), {})
    assert (merged.eos_token_id, origins["eos_token_id"]) == (9, "model")
    theirs = transformers.GenerationConfig.from_pretrained(tmp_path)  # reads a null as unset
    assert (theirs.max_new_tokens, theirs.eos_token_id) == (8, None)
    theirs = transformers.GenerationConfig.from_dict(config.to_dict())
    assert (theirs.max_new_tokens, theirs.eos_token_id) == (8, None)


def test_what_wins_over_a_whole_dict_was_set() -> None:
    whole = GenerationConfig(top_k=7).to_dict()
    assert GenerationConfig.from_dict(whole, num_beams=1).explicit == {"top_k", "num_beams"}
    assert GenerationConfig.from_dict({**whole, "temperature": 0.5}).explicit == {"top_k", "temperature"}
    for wrong in (3, "top_k", [3], ["a"] * 5000):
        with pytest.raises(SettingError, match="list of the names"):
            GenerationConfig.from_dict({**whole, "_explicit": wrong})
