from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from unspool.config import (
    CompileConfig,
    GenerationConfig,
    GumbelWatermarkingConfig,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)
from unspool.errors import SettingError


def test_defaults_are_the_reference_s() -> None:
    assert WatermarkingConfig().to_dict() == transformers.WatermarkingConfig().to_dict()
    ours = SynthIDTextWatermarkingConfig(ngram_len=5, keys=[1, 2]).to_dict()
    assert ours == transformers.SynthIDTextWatermarkingConfig(ngram_len=5, keys=[1, 2]).to_dict()
    assert CompileConfig().to_dict() == {
        "fullgraph": True,
        "dynamic": None,
        "backend": "inductor",
        "mode": "reduce-overhead",
        "options": None,
    }


def test_forms(tmp_path: Path) -> None:
    config = WatermarkingConfig(bias=1.0)
    assert json.loads(config.to_json_string())["bias"] == 1.0
    assert dict(config) == config.to_dict()
    config.to_json_file(tmp_path / "w.json")
    assert WatermarkingConfig.from_dict(json.loads((tmp_path / "w.json").read_text())) == config
    assert WatermarkingConfig.from_dict({"bias": 2.0}, context_width=3).context_width == 3
    config.update(bias=3.0, colour="green")
    assert config.bias == 3.0
    assert not hasattr(config, "colour")
    assert repr(config).startswith("WatermarkingConfig {")
    config.validate()


def test_impossible_values_are_refused() -> None:
    for bad in (
        WatermarkingConfig(greenlist_ratio=1.1),
        WatermarkingConfig(greenlist_ratio=0.0),
        WatermarkingConfig(greenlist_ratio=1.0),
        GumbelWatermarkingConfig(seeding_scheme="lefthash"),
        SynthIDTextWatermarkingConfig(ngram_len=1, keys=[1]),
        WatermarkingConfig(greenlist_ratio=float("nan")),
        WatermarkingConfig(seeding_scheme="x"),
        WatermarkingConfig(context_width=0),
        WatermarkingConfig(bias=float("inf")),
        SynthIDTextWatermarkingConfig(ngram_len=5, keys=[1], sampling_table_size=2**24 + 1),
        SynthIDTextWatermarkingConfig(ngram_len=0, keys=[1]),
        SynthIDTextWatermarkingConfig(ngram_len=5, keys=[]),
    ):
        with pytest.raises(SettingError, match="watermarking_config"):
            bad.validate()
    with pytest.raises(SettingError, match="keys"):
        SynthIDTextWatermarkingConfig.from_dict({"ngram_len": 5})


SECRET = 918273645546372819


@pytest.mark.parametrize(
    "config",
    [
        WatermarkingConfig(hashing_key=SECRET),
        GumbelWatermarkingConfig(hashing_key=SECRET),
        SynthIDTextWatermarkingConfig(5, [SECRET, 1]),
    ],
)
def test_keys_are_not_shown(config: Any) -> None:
    """What is logged and printed has no key in it; what is saved has."""
    settings = GenerationConfig(watermarking_config=config)
    rows = GenerationConfig(watermarking_config=[config, None])
    for shown in (repr(config), str(config), f"{config}", repr(settings), str(settings), repr(rows)):
        assert str(SECRET) not in shown
    assert str(SECRET) in config.to_json_string()
    assert GenerationConfig.from_dict(json.loads(settings.to_json_string())).watermarking_config == config
    assert GenerationConfig.from_dict(json.loads(rows.to_json_string())).watermarking_config == [config, None]


@pytest.mark.parametrize("make", [WatermarkingConfig, GumbelWatermarkingConfig])
def test_errors_do_not_tell_a_key(make: Any) -> None:
    for wrong in (str(SECRET), float(SECRET), SECRET * 2**10):
        with pytest.raises(SettingError, match="hashing_key") as error:
            make(hashing_key=wrong).validate()
        assert str(wrong) not in str(error.value)


def test_settings_of_transformers_are_ours() -> None:
    theirs = transformers.WatermarkingConfig(bias=3.0, seeding_scheme="selfhash")
    synth = transformers.SynthIDTextWatermarkingConfig(ngram_len=4, keys=[5, 6])
    config = GenerationConfig(watermarking_config=theirs, compile_config=transformers.CompileConfig(mode="default"))
    assert config.watermarking_config == WatermarkingConfig(bias=3.0, seeding_scheme="selfhash")
    assert isinstance(config.compile_config, CompileConfig) and config.compile_config.mode == "default"
    config.watermarking_config = [theirs, synth]
    assert config.watermarking_config[1] == SynthIDTextWatermarkingConfig(ngram_len=4, keys=[5, 6])
