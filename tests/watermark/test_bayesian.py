from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from tests.watermark.test_detector import VOCAB, write
from unspool.config import SynthIDTextWatermarkingConfig
from unspool.errors import InputError, LoadError, SettingError
from unspool.watermark import (
    BayesianDetectorConfig,
    BayesianDetectorModel,
    SynthIDTextWatermarkDetector,
)

KEYS = [100 + 37 * place for place in range(8)]
CONFIG = SynthIDTextWatermarkingConfig(3, KEYS)
TOKENIZER = SimpleNamespace(eos_token_id=2)


def make_pair() -> tuple[BayesianDetectorModel, Any]:
    """Our detector and the reference's, with the same random weights."""
    ours = BayesianDetectorModel(BayesianDetectorConfig(watermarking_depth=8))
    theirs = transformers.BayesianDetectorModel(transformers.BayesianDetectorConfig(watermarking_depth=8))
    torch.manual_seed(0)
    weights = {name: torch.randn_like(value) * 0.1 for name, value in ours.state_dict().items()}
    weights["prior"] = torch.tensor([0.3])
    ours.load_state_dict(weights)
    theirs.load_state_dict(weights)
    return ours, theirs


def test_posteriors_and_losses_are_the_reference_s() -> None:
    ours, theirs = make_pair()
    g_values, mask = torch.randint(0, 2, (5, 20, 8)), torch.randint(0, 2, (5, 20))
    labels = torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0])
    found, expected = ours(g_values, mask, labels, 0.01), theirs(g_values, mask, labels, 0.01)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    assert torch.equal(ours(g_values, mask, return_dict=True).posterior_probabilities, found[0])


def test_a_detector_is_saved_and_loaded(tmp_path: Path) -> None:
    ours, _ = make_pair()
    ours.config.set_detector_information("a model", CONFIG)
    ours.save_pretrained(tmp_path)
    again = BayesianDetectorModel.from_pretrained(tmp_path)
    assert again.config.to_dict() == ours.config.to_dict()
    for name, value in ours.state_dict().items():
        assert torch.equal(again.state_dict()[name], value)
    (tmp_path / "config.json").write_text(json.dumps({"watermarking_depth": 5}))
    with pytest.raises(LoadError, match="a detector of 5 rounds"):
        BayesianDetectorModel.from_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(LoadError, match="can't be read"):
        BayesianDetectorModel.from_pretrained(tmp_path)


def test_keys_can_be_left_out_of_what_is_saved(tmp_path: Path) -> None:
    ours, _ = make_pair()
    ours.config.set_detector_information("a model", CONFIG)
    ours.config.hide_keys()
    ours.save_pretrained(tmp_path)
    text = (tmp_path / "config.json").read_text()
    assert '"keys":' not in text and str(KEYS[-1]) not in json.loads(text)["watermarking_config"].values()
    again = BayesianDetectorModel.from_pretrained(tmp_path)
    SynthIDTextWatermarkDetector(again, CONFIG.construct_processor(VOCAB, "cpu"), TOKENIZER)
    other = SynthIDTextWatermarkingConfig(3, [*KEYS[:-1], 5])
    with pytest.raises(SettingError, match=r"another watermark: `keys` is another one$"):
        SynthIDTextWatermarkDetector(again, other.construct_processor(VOCAB, "cpu"), TOKENIZER)


def test_a_detector_of_other_settings_is_refused() -> None:
    ours, _ = make_pair()
    ours.config.set_detector_information("a model", CONFIG)
    other = SynthIDTextWatermarkingConfig(4, KEYS, sampling_table_seed=3).construct_processor(VOCAB, "cpu")
    with pytest.raises(
        SettingError, match=r"`ngram_len` is 3 there and 4 here; `sampling_table_seed` is 0 there and 3"
    ):
        SynthIDTextWatermarkDetector(ours, other, TOKENIZER)
    few = SynthIDTextWatermarkingConfig(3, KEYS[:5]).construct_processor(VOCAB, "cpu")
    with pytest.raises(SettingError, match="5 keys and the detector was trained for 8 rounds"):
        SynthIDTextWatermarkDetector(ours, few, TOKENIZER)
    with pytest.raises(InputError, match="another number of keys"):
        ours(torch.zeros(1, 4, 5), torch.ones(1, 4))


@pytest.mark.parametrize("bad", [{"watermarking_depth": 0}, {"base_rate": 1.0}, {"base_rate": float("nan")}])
def test_impossible_settings_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(SettingError, match=next(iter(bad))):
        BayesianDetectorConfig(**bad)
    with pytest.raises(SettingError, match="needs `watermarking_depth`"):
        BayesianDetectorModel(BayesianDetectorConfig())


def test_a_file_sets_no_attributes_but_its_settings(tmp_path: Path) -> None:
    others = {"to_dict": 1, "hide_keys": [], "__class__": "x", "__dict__": {}, "model_type": "bayesian_detector"}
    settings = {"watermarking_depth": 4, "base_rate": 0.25, "model_name": "m", **others}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    found = BayesianDetectorConfig.from_pretrained(tmp_path)
    assert type(found) is BayesianDetectorConfig and callable(found.to_dict) and callable(found.hide_keys)
    assert found.to_dict() == {**settings, "watermarking_config": None}  # as the file had it
    for name in ("to_dict", "base_rte", "_others"):
        with pytest.raises(SettingError, match=f"not '{name}'"):
            BayesianDetectorConfig(**{name: 1})
    for name, value in {"model_name": 3, "watermarking_config": [1], "watermarking_depth": True}.items():
        with pytest.raises(SettingError, match=name):
            BayesianDetectorConfig(**{name: value})


def test_the_detector_reads_texts_as_the_reference_s() -> None:
    ours, theirs = make_pair()
    texts = write(CONFIG, 3, 40)
    texts[1, 20] = 2  # ends there
    mark = transformers.SynthIDTextWatermarkLogitsProcessor(**CONFIG.to_dict(), device="cpu")
    expected = transformers.generation.SynthIDTextWatermarkDetector(theirs, mark, TOKENIZER)(texts)
    found = SynthIDTextWatermarkDetector(ours, CONFIG.construct_processor(VOCAB, "cpu"), TOKENIZER)(texts)
    torch.testing.assert_close(found[0], expected[0].detach())
