"""Names in a GenerationConfig that are no settings: refused, as keywords are, unless a model's file has them."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from tests.api.dictation import CHAT

import unspool
from unspool import GenerationConfig, LanguageModel
from unspool.errors import SettingError

MISSPELT = {"temprature": "temperature", "topk": "top_k", "max_tokens": "max_new_tokens", "n_beams": "num_beams"}


@pytest.mark.parametrize(("name", "meant"), MISSPELT.items())
def test_a_misspelt_name_is_refused_where_a_config_is_made(name: str, meant: str, tmp_path: Path) -> None:
    refused = pytest.raises(SettingError, match=f"{name!r}; did you mean {meant!r}")
    with refused:
        GenerationConfig(**{name: 1})
    with refused:
        GenerationConfig(**{name: None})
    with refused:
        GenerationConfig.from_dict({"do_sample": True, name: 1})
    with refused:
        GenerationConfig.from_dict({"do_sample": True}, **{name: 1})
    GenerationConfig(max_new_tokens=3).save_pretrained(tmp_path)
    with refused:
        GenerationConfig.from_pretrained(tmp_path, **{name: 1})
    assert GenerationConfig.from_dict({}, return_unused_kwargs=True, **{name: 1})[1] == {name: 1}
    assert GenerationConfig().update(**{name: 1}) == {name: 1}


@pytest.mark.parametrize("name", ["temprature", "colour"])
def test_a_call_refuses_a_config_with_names_that_it_would_not_read(lm: LanguageModel, name: str) -> None:
    config = GenerationConfig(max_new_tokens=2)
    setattr(config, name, 0.01)
    ids = [[1, 2, 3]]
    calls: list[Any] = [
        lambda: unspool.generate(lm.model, ids, generation_config=config),
        lambda: list(unspool.stream(lm.model, ids, config)),
        lambda: lm.generate("a", generation_config=config),
        lambda: list(lm.stream("a", generation_config=config)),
        lambda: lm.start("a", generation_config=config),
        lambda: list(lm.trace("a", generation_config=config)),
        lambda: unspool.generate(lm.model, ids, generation_config=copy.deepcopy(config)),
    ]
    for call in calls:
        with pytest.raises(SettingError, match=f"the generation_config has no setting {name!r}"):
            call()
    with unspool.Engine(lm) as engine, pytest.raises(SettingError, match=name):
        engine.submit("a", generation_config=config).result()
    lm.generation_config = GenerationConfig(max_new_tokens=2)
    setattr(lm.generation_config, name, 0.01)
    with pytest.raises(SettingError, match=f"the model's generation_config has no setting {name!r}"):
        lm.generate("a")
    with pytest.raises(SettingError, match=name):
        lm.generation_config = config


def test_arguments_and_names_of_speech_are_refused_by_what_they_are(lm: LanguageModel) -> None:
    config = GenerationConfig(max_new_tokens=2)
    config.streamer = print
    with pytest.raises(SettingError, match="'streamer': it is an argument of generate"):
        lm.generate("a", generation_config=config)
    with pytest.raises(SettingError, match="'task': it is for models of speech"):
        lm.generate("a", generation_config=GenerationConfig(max_new_tokens=2, task="translate"))
    with pytest.raises(SettingError, match="`speculation_type` in the generation_config is a setting of transformers'"):
        lm.generate("a", generation_config=GenerationConfig(max_new_tokens=2, speculation_type="mtp"))


def test_names_of_a_model_s_own_file_are_kept(folder: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    for path in folder.iterdir():
        (own / path.name).write_bytes(path.read_bytes())
    written = {"chat_format": "chatml", "temprature": 0.5, "max_window_size": 6144, "max_new_tokens": 2}
    (own / "generation_config.json").write_text(json.dumps(written))
    lm = unspool.load(own, device="cpu")
    assert lm.generation_config.chat_format == "chatml"
    assert len(lm.generate("a", eos_token_id=None).token_ids[0]) == 2
    config = GenerationConfig.from_pretrained(own, eos_token_id=None)
    assert config.temprature == 0.5
    for same in (config, copy.copy(config), copy.deepcopy(config), GenerationConfig.from_dict(config.to_dict())):
        assert same == config
        assert len(lm.generate("a", generation_config=same).token_ids[0]) == 2
    lm.generation_config = copy.deepcopy(lm.generation_config)
    lm.generation_config.temperture = 0.5  # somebody's, not the file's
    with pytest.raises(SettingError, match="'temperture'; did you mean 'temperature'"):
        lm.generate(CHAT)
