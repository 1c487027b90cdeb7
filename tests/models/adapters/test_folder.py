"""`unspool.load` of folders that have no native form, and of those that are kept from it."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from tests.models.adapters.tiny import make_inputs, make_once

import unspool
from unspool.errors import LoadError, MissingExtraError, SettingError, UnsupportedError
from unspool.models.adapters.decoder import AdaptedDecoder
from unspool.models.adapters.pair import AdaptedPair
from unspool.models.native import NativeModel

NEW = {"max_new_tokens": 6, "eos_token_id": None}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_once("deepseek_v3").save_pretrained(tmp_path)
    return tmp_path


def test_a_folder_without_a_native_form(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "unspool.models"):
        lm = unspool.load(folder)
    [line] = caplog.messages
    assert line == f"DeepseekV3ForCausalLM has no native form: it runs through transformers {transformers.__version__}"
    assert isinstance(lm.model, AdaptedDecoder) and lm.model.dtype == torch.float32
    assert lm.generation_config.pad_token_id == 0
    inputs = make_inputs()
    expected = make_once("deepseek_v3").generate(**inputs, **NEW, do_sample=False)
    assert torch.equal(unspool.generate(lm, **inputs, **NEW), expected)
    ids = inputs["input_ids"][2].tolist()
    assert lm.generate(ids, **NEW).token_ids[0] == expected[2, 12:].tolist()
    beginning = lm.prefix(ids[:7])
    assert lm.generate(ids[7:], prefix=beginning, **NEW).token_ids[0] == expected[2, 12:].tolist()
    assert lm.model(inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits.shape == (3, 12, 97)
    parameters = sum(part.numel() for part in make_once("deepseek_v3").parameters())
    assert (lm.model.num_parameters(), lm.model.weights_bytes) == (parameters, 4 * parameters)


def test_an_encoder_decoder_without_a_native_form(tmp_path: Path) -> None:
    make_once("blenderbot_small").save_pretrained(tmp_path)
    lm = unspool.load(tmp_path)
    assert isinstance(lm.model, AdaptedPair)
    inputs = make_inputs(is_left=False)
    expected = make_once("blenderbot_small").generate(**inputs, **NEW, do_sample=False)
    assert torch.equal(unspool.generate(lm, **inputs, **NEW), expected)


def test_the_choice_is_the_callers(tmp_path: Path, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_once("llama").save_pretrained(tmp_path / "llama")
    with caplog.at_level(logging.INFO, "unspool.models"):
        native, adapted = unspool.load(tmp_path / "llama"), unspool.load(tmp_path / "llama", native=False)
    assert f"LlamaForCausalLM runs through transformers {transformers.__version__}, as asked" in caplog.messages
    assert "native form" not in caplog.text
    assert isinstance(native.model, NativeModel) and isinstance(adapted.model, AdaptedDecoder)
    inputs = make_inputs()
    assert torch.equal(unspool.generate(native, **inputs, **NEW), unspool.generate(adapted, **inputs, **NEW))
    with pytest.raises(
        UnsupportedError, match=r"DeepseekV3ForCausalLM, which has no native model.*leave native=True out"
    ):
        unspool.load(folder, native=True)
    with pytest.raises(SettingError, match="native='no' is neither"):
        unspool.load(folder, native="no")
    with pytest.raises(UnsupportedError, match="quantize='int8' packs the weights of native models"):
        unspool.load(folder, quantize="int8")


def test_weights_that_are_not_all_there(folder: Path) -> None:
    """transformers would make up the head and go on."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 4}))
    with pytest.raises(LoadError, match=r"lacks \d+ of the tensors that DeepseekV3ForCausalLM needs"):
        unspool.load(folder)


def test_architectures_that_nobody_knows(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    unknown = {**config, "architectures": ["WhoForCausalLM"], "model_type": "who", "auto_map": {"AutoConfig": "a.B"}}
    (folder / "config.json").write_text(json.dumps(unknown))
    (folder / "a.py").write_text("raise SystemExit('code of a folder was run')")
    with pytest.raises(LoadError, match=r"WhoForCausalLM, which has no native form, and transformers .* can't load it"):
        unspool.load(folder)


def test_without_transformers_the_extra_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtraError, match=r"DeepseekV3ForCausalLM.*pip install 'unspool\[transformers\]'"):
        unspool.load(folder)


def test_nothing_of_transformers_is_imported_for_native_models(tmp_path: Path) -> None:
    make_once("llama").save_pretrained(tmp_path)
    code = (
        "import sys, unspool; lm = unspool.load(sys.argv[1]); unspool.generate(lm, [[5, 6]], max_new_tokens=2);"
        "print('transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
