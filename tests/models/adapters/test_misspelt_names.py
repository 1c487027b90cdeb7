"""Names in a transformers GenerationConfig that nothing reads: refused if a caller put them there."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.adapters.test_stated_defaults import make_native
from tests.models.adapters.tiny import make

import unspool
from unspool.errors import SettingError

transformers = pytest.importorskip("transformers")

IDS = torch.tensor([[5, 6, 7, 5]])


@pytest.fixture(params=["object", "adapter", "native"])
def model(request: pytest.FixtureRequest) -> Any:
    if request.param == "native":
        return make_native()
    made = make("llama")
    unspool.attach(made, native=request.param == "object")
    return unspool.detach(made) if request.param == "object" else made


@pytest.mark.parametrize("name", ["temprature", "numbeams", "colour"])
def test_a_misspelt_name_is_refused(model: Any, name: str) -> None:
    config = transformers.GenerationConfig(max_new_tokens=3, **{name: 0.5})
    with pytest.raises(SettingError, match=f"the generation_config has no setting {name!r}"):
        unspool.generate(model, IDS, generation_config=config)
    with pytest.raises(SettingError, match=f"the generation_config has no setting {name!r}"):
        list(unspool.stream(model, IDS, copy.deepcopy(config)))


def test_a_name_of_transformers_that_is_not_applied_is_refused(model: Any) -> None:
    config = transformers.GenerationConfig(max_new_tokens=3)
    config.speculation_type = "mtp"
    with pytest.raises(SettingError, match="`speculation_type` in the generation_config is a setting of transformers'"):
        unspool.generate(model, IDS, generation_config=config)


def test_names_of_a_file_are_kept(model: Any, tmp_path: Path) -> None:
    written = {"chat_format": "chatml", "max_new_tokens": 3, "eos_token_id": None}
    (tmp_path / "generation_config.json").write_text(json.dumps(written))
    config = transformers.GenerationConfig.from_pretrained(tmp_path)
    for one in (config, copy.deepcopy(config)):
        assert unspool.generate(model, IDS, generation_config=one).shape == (1, 7)
    config.temprature = 0.5
    with pytest.raises(SettingError, match="did you mean 'temperature'"):
        unspool.generate(model, IDS, generation_config=config)


def test_a_model_s_own_names_are_kept_in_copies_of_its_settings(tmp_path: Path) -> None:
    made = make("llama")
    written = {"chat_format": "chatml", "temprature": 0.5, "max_new_tokens": 3, "eos_token_id": None}
    (tmp_path / "generation_config.json").write_text(json.dumps(written))
    made.generation_config = transformers.GenerationConfig.from_pretrained(tmp_path)
    assert unspool.generate(made, IDS).shape == (1, 7)
    config = copy.deepcopy(made.generation_config)
    config.do_sample = False
    assert unspool.generate(made, IDS, generation_config=config).shape == (1, 7)


def test_a_misspelt_name_in_an_object_s_own_settings_is_refused() -> None:
    made = make("llama")
    made.generation_config = transformers.GenerationConfig(max_new_tokens=3, temprature=0.5)
    with pytest.raises(SettingError, match="the model's generation_config has no setting 'temprature'"):
        unspool.generate(made, IDS)
