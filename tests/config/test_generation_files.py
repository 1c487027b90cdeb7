"""Settings in files: saved, loaded, fetched from the hub, damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from unspool.config import (
    PARAMETERS,
    CompileConfig,
    GenerationConfig,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)
from unspool.errors import InputError, LoadError, ModelNotFoundError, SettingError


@pytest.mark.parametrize("name", [None, "foo.json"])
def test_saving_and_loading(tmp_path: Path, name: str | None) -> None:
    config = GenerationConfig(
        do_sample=True,
        temperature=0.7,
        length_penalty=1.0,
        bad_words_ids=[[1, 2, 3], [4, 5]],
        exponential_decay_length_penalty=(5, 1.1),
        lang_to_id={"<|en|>": 3},
    )
    config.save_pretrained(tmp_path / "new", name)
    assert [path.name for path in (tmp_path / "new").iterdir()] == [name or "generation_config.json"]
    loaded = GenerationConfig.from_pretrained(tmp_path / "new", name)
    assert loaded == config
    assert hash(loaded) == hash(config)
    assert loaded.exponential_decay_length_penalty == [5, 1.1]
    assert loaded.lang_to_id == {"<|en|>": 3}
    assert loaded.explicit == config.explicit
    overridden = GenerationConfig.from_pretrained(tmp_path / "new", config_name=name, temperature=1.0)
    assert overridden.temperature == 1.0
    assert overridden.do_sample is True
    as_file = GenerationConfig.from_pretrained(tmp_path / "new" / (name or "generation_config.json"))
    assert as_file == config
    with_unused, unused = GenerationConfig.from_pretrained(
        tmp_path / "new", name, top_k=1, foo=False, return_unused_kwargs=True
    )
    assert with_unused.top_k == 1
    assert unused == {"foo": False}
    assert "foo" not in with_unused.to_dict()


def test_the_reference_reads_what_we_save(tmp_path: Path) -> None:
    GenerationConfig(do_sample=True, temperature=0.7, eos_token_id=[1, 2]).save_pretrained(tmp_path)
    theirs = transformers.GenerationConfig.from_pretrained(tmp_path)
    assert (theirs.do_sample, theirs.temperature, theirs.eos_token_id) == (True, 0.7, [1, 2])
    theirs.top_p = 0.5
    theirs.save_pretrained(tmp_path)
    assert GenerationConfig.from_pretrained(tmp_path).top_p == 0.5


def test_bias_and_watermarks_survive_a_file(tmp_path: Path) -> None:
    config = GenerationConfig(sequence_bias={(45, 67): -0.6, (89,): float("-inf")})
    config.watermarking_config = WatermarkingConfig(bias=1.5, context_width=10)
    config.save_pretrained(tmp_path)
    loaded = GenerationConfig.from_pretrained(tmp_path)
    assert loaded.sequence_bias == [[[45, 67], -0.6], [[89], float("-inf")]]
    assert loaded.watermarking_config == WatermarkingConfig(bias=1.5, context_width=10)
    GenerationConfig(watermarking_config=SynthIDTextWatermarkingConfig(5, [1, 2])).save_pretrained(tmp_path)
    loaded = GenerationConfig.from_pretrained(tmp_path)
    assert loaded.watermarking_config == SynthIDTextWatermarkingConfig(5, [1, 2])


def test_saving_is_refused_with_the_reasons(tmp_path: Path) -> None:
    config = GenerationConfig()
    config.temperature = 0.5
    with pytest.raises(ValueError, match="Fix these issues to save the configuration") as caught:
        config.save_pretrained(tmp_path)
    assert "`temperature` is set to `0.5`" in str(caught.value)
    config = GenerationConfig()
    config.num_return_sequences = 2
    with pytest.raises(ValueError, match="Fix these issues to save the configuration") as caught:
        config.save_pretrained(tmp_path)
    greedy = "Greedy methods without beam search do not support `num_return_sequences` different than 1"
    assert greedy in str(caught.value)
    with pytest.raises(SettingError, match=r"\['strange'\] holds a object"):
        GenerationConfig(strange=[object()]).save_pretrained(tmp_path)
    with pytest.raises(SettingError, match="'comit_message' is not known"):
        GenerationConfig().save_pretrained(tmp_path, push_to_hub=True, comit_message="x")
    with pytest.raises(SettingError, match="add push_to_hub=True"):
        GenerationConfig().save_pretrained(tmp_path, token="x")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="is a file"):
        GenerationConfig().save_pretrained(tmp_path / "file")


def test_compile_config_stays_out_of_files(tmp_path: Path) -> None:
    GenerationConfig(compile_config=CompileConfig()).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "generation_config.json").read_text()) == {}


@pytest.mark.parametrize("content", ["", "[1]", "{", '"a"', "\x00", "[" * 100_000])
def test_damaged_files_are_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(LoadError, match=r"generation_config\.json"):
        GenerationConfig.from_pretrained(tmp_path)


def test_missing_files_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelNotFoundError, match=r"has no file other\.json"):
        GenerationConfig.from_pretrained(tmp_path, "other.json")
    with pytest.raises(ModelNotFoundError, match="no hub id"):
        GenerationConfig.from_pretrained(str(tmp_path / "nowhere"))
    with pytest.raises(ModelNotFoundError, match="found on the hub"):
        GenerationConfig.from_pretrained("owner/name", local_files_only=True, cache_dir=tmp_path)


def test_a_hub_model_is_asked_for_with_its_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.json").write_text('{"top_k": 3}')
    asked: list[Any] = []

    def download(name: str, file_name: str, **options: Any) -> str:
        asked.append((name, file_name, options))
        return str(tmp_path / "x.json")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    config = GenerationConfig.from_pretrained("owner/name", revision="v2.0", do_sample=True)
    assert (config.top_k, config.do_sample) == (3, True)
    assert asked == [("owner/name", "generation_config.json", {"revision": "v2.0"})]


def test_numbers_of_thousands_of_digits_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="max_new_tokens") as caught:
        PARAMETERS["max_new_tokens"].parse("9" * 5000)
    assert len(str(caught.value)) < 300
    (tmp_path / "generation_config.json").write_text('{"max_new_tokens": ' + "9" * 5000 + "}")
    with pytest.raises(LoadError, match="not valid JSON"):
        GenerationConfig.from_pretrained(tmp_path)
