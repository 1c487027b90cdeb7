"""Classes of one architecture load its checkpoints as the classes for all do, and refuse others by name."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import unspool
from unspool import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, LoadError, PretrainedModel, SettingError
from unspool.models.registry import FAMILIES
from unspool.pretrained.architectures import ADAPTED, TOKENIZERS, list_architectures

OWN = {
    "llama": "LlamaForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "mamba": "MambaForCausalLM",
    "t5": "T5ForConditionalGeneration",
    "whisper": "WhisperForConditionalGeneration",
    "bart": "BartForConditionalGeneration",
}


def test_there_is_a_class_for_every_architecture_of_a_native_family() -> None:
    names = {name for family in FAMILIES.values() for name in family.architectures}
    assert {*names, *ADAPTED} == {*list_architectures()} and len(names) > 60
    for name in (*names, *ADAPTED):
        kind = getattr(unspool, name)
        assert issubclass(kind, PretrainedModel) and kind.__name__ == name and kind is getattr(unspool, name)
        with pytest.raises(TypeError, match=rf"use {name}.from_pretrained"):
            kind({})
    for name in TOKENIZERS:
        for kind in (getattr(unspool, f"{name}Tokenizer"), getattr(unspool, f"{name}TokenizerFast")):
            with pytest.raises(TypeError, match="from_pretrained"):
                kind()
    for name in ("LlamaForCausalLMs", "Tokenizerfast", "GPT2", "FakeForCausalLM"):
        with pytest.raises(AttributeError, match=name):
            getattr(unspool, name)


@pytest.mark.parametrize("folder", OWN)
def test_it_loads_its_own_and_refuses_every_other(models: Path, folder: str) -> None:
    kind: Any = getattr(unspool, OWN[folder])
    model = kind.from_pretrained(models / folder, dtype=torch.float32, pad_token_id=0)
    assert isinstance(model, kind) and isinstance(copy.copy(model), kind)
    assert model.generation_config.pad_token_id == 0 and model.config.architectures == [OWN[folder]]
    assert (model.to("cpu").eval().device.type, model.dtype) == ("cpu", torch.float32)
    for other, name in OWN.items():
        if other != folder:
            with pytest.raises(LoadError, match=rf"has the architecture {name}, .* {OWN[folder]}; load it with {name}"):
                kind.from_pretrained(models / other)


def test_it_writes_what_the_class_for_all_writes(models: Path) -> None:
    model, other = (kind.from_pretrained(models / "gpt2") for kind in (unspool.GPT2LMHeadModel, AutoModelForCausalLM))
    inputs = unspool.GPT2Tokenizer.from_pretrained(models / "gpt2")(["the sea"], return_tensors="pt")
    assert torch.equal(model.generate(**inputs, num_beams=2), other.generate(**inputs, num_beams=2))
    assert torch.equal(AutoModel.from_pretrained(models / "gpt2")(**inputs).logits, other(**inputs).logits)
    pair = AutoModel.from_pretrained(models / "t5")
    assert pair.config.is_encoder_decoder and pair.generate(**inputs, max_new_tokens=2).shape == (1, 3)


def change(source: Path, target: Path, file: str, **values: Any) -> Path:
    """A folder like another, with values of one of its files changed, or taken out where they are None."""
    shutil.copytree(source, target)
    read = json.loads((target / file).read_text()) | values
    (target / file).write_text(json.dumps({name: value for name, value in read.items() if value is not None}))
    return target


def test_an_architecture_is_its_models_type_where_none_is_named(models: Path, tmp_path: Path) -> None:
    bare = change(models / "mamba", tmp_path / "bare", "config.json", architectures=None)
    assert unspool.MambaForCausalLM.from_pretrained(bare).config.model_type == "mamba"
    with pytest.raises(LoadError, match="has the architecture MambaForCausalLM"):
        unspool.FalconMambaForCausalLM.from_pretrained(bare)
    strange = change(models / "llama", tmp_path / "strange", "config.json", architectures=["WhoForCausalLM"])
    with pytest.raises(LoadError, match="WhoForCausalLM, and is no model for LlamaForCausalLM"):
        unspool.LlamaForCausalLM.from_pretrained(strange)


def test_a_gguf_file_has_its_familys_architecture() -> None:
    model = unspool.LlamaForCausalLM.from_pretrained("smollm2-135m")
    assert model.config == AutoConfig.from_pretrained("smollm2-135m")
    with pytest.raises(LoadError, match="load it with LlamaForCausalLM"):
        unspool.MistralForCausalLM.from_pretrained("smollm2-135m")


def test_a_tokenizers_class_asks_for_its_own(models: Path, tmp_path: Path) -> None:
    mine = unspool.GPT2TokenizerFast.from_pretrained(models / "gpt2", padding_side="left")
    assert mine("the sea").input_ids == AutoTokenizer.from_pretrained(models / "gpt2")("the sea").input_ids
    assert mine.padding_side == "left"
    with pytest.raises(LoadError, match="of a 't5' model, and none for GPT2Tokenizer; load it with AutoTokenizer"):
        unspool.GPT2Tokenizer.from_pretrained(models / "t5")
    for named in ("LlamaTokenizer", "LlamaTokenizerFast"):
        folder = change(models / "gpt2", tmp_path / named, "tokenizer_config.json", tokenizer_class=named)
        assert len(unspool.LlamaTokenizer.from_pretrained(folder)) == len(mine)
        with pytest.raises(LoadError, match=r"of the class 'LlamaTokenizer(Fast)?', and none for GPT2Tokenizer"):
            unspool.GPT2Tokenizer.from_pretrained(folder)
    with pytest.raises(SettingError, match=r"GPT2Tokenizer\.from_pretrained"):
        unspool.GPT2Tokenizer.from_pretrained(models / "gpt2", colour="red")


@pytest.mark.parametrize("folder", ["llama", "gpt2", "mamba", "t5", "whisper"])
def test_a_config_is_read_without_weights(models: Path, tmp_path: Path, folder: str) -> None:
    (tmp_path / "config.json").write_text((models / folder / "config.json").read_text())
    found = AutoConfig.from_pretrained(tmp_path, trust_remote_code=True)
    own = AutoModel.from_pretrained(models / folder).config
    assert (found.vocab_size, found.eos_token_id) == (own.vocab_size, own.eos_token_id)
    if folder in ("llama", "gpt2"):
        assert found == own and found.num_hidden_layers == own.num_hidden_layers
    assert AutoConfig.from_pretrained(tmp_path, eos_token_id=7).eos_token_id == 7
    with pytest.raises(SettingError, match="does not know 'colour'"):
        AutoConfig.from_pretrained(tmp_path, colour=1)
    with pytest.raises(LoadError, match=r"no config\.json"):
        AutoConfig.from_pretrained(tmp_path.parent)


@pytest.mark.filterwarnings("ignore")  # transformers' own
def test_a_class_without_a_native_form_is_loaded_by_transformers_and_reads_pictures(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    seen = {**sizes, "image_size": 32, "patch_size": 8}
    ends = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    config = transformers.GitConfig(vocab_size=97, max_position_embeddings=64, vision_config=seen, **sizes, **ends)
    torch.manual_seed(0)
    theirs = transformers.GitForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path)
    model = unspool.GitForCausalLM.from_pretrained(tmp_path)
    ids, picture = torch.tensor([[1, 5], [1, 7]]), torch.randn(2, 3, 32, 32)
    for asked in ({}, {"num_beams": 3}):
        expected = theirs.generate(ids, pixel_values=picture, max_new_tokens=6, **asked)
        assert torch.equal(model.generate(ids, pixel_values=picture, max_new_tokens=6, **asked), expected)
    with pytest.raises(LoadError, match="GitForCausalLM, and is no model for GPT2LMHeadModel; load it with GitFor"):
        unspool.GPT2LMHeadModel.from_pretrained(tmp_path)
