"""`from unspool import AutoModel…`: what comes back answers as transformers' own objects of the same folders do."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import unspool
from unspool import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq, AutoTokenizer, set_seed
from unspool.errors import LoadError, SettingError, UnsupportedError
from unspool.pretrained.keywords import MODEL_KEYWORDS, TOKENIZER_KEYWORDS

TEXTS = ["The sea is", "A lighthouse on a rock in the sea"]


@pytest.fixture(scope="module")
def llama(models: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(models / "llama")


@pytest.mark.parametrize("side", [None, "left"])
def test_decoder(models: Path, side: str | None) -> None:
    options = {} if side is None else {"padding_side": side}
    ours, theirs = (
        library.AutoTokenizer.from_pretrained(models / "llama", **options) for library in (unspool, transformers)
    )
    inputs, expected = (tokenizer(TEXTS, return_tensors="pt", padding=True) for tokenizer in (ours, theirs))
    assert ours.padding_side == theirs.padding_side
    assert torch.equal(inputs.input_ids, expected.input_ids)
    assert torch.equal(inputs.attention_mask, expected.attention_mask)
    model = AutoModelForCausalLM.from_pretrained(models / "llama", torch_dtype=torch.float32).eval()
    reference = transformers.AutoModelForCausalLM.from_pretrained(models / "llama").eval()
    assert model.config.eos_token_id == reference.config.eos_token_id and model.can_generate()
    out = model.generate(**inputs)
    assert out.shape[1] == inputs.input_ids.shape[1] + 20
    if side == "left":
        assert torch.equal(out, reference.generate(**expected, max_new_tokens=20))
        assert ours.batch_decode(out, skip_special_tokens=True) == theirs.batch_decode(out, skip_special_tokens=True)
    alone = ours(TEXTS[1], return_tensors="pt")
    assert torch.allclose(model(**alone).logits, reference(**alone).logits, atol=1e-4)
    assert torch.equal(model.forward(**alone).logits, model(**alone).logits)


@pytest.mark.parametrize("options", [{}, {"native": False}])
@pytest.mark.parametrize("make_copy", [copy.copy, copy.deepcopy])
def test_a_copy_has_settings_of_its_own(models: Path, make_copy: Any, options: dict[str, Any]) -> None:
    ids = torch.tensor([[5, 6, 7]])
    model = AutoModelForCausalLM.from_pretrained(models / "llama", **options)
    expected = model.generate(ids)
    other = make_copy(model)
    assert torch.equal(other.generate(ids), expected)
    other.generation_config.max_new_tokens = 2
    assert torch.equal(other.generate(ids), expected[:, :5])
    assert other.as_language_model().generate(ids).token_ids == expected[:, 3:5].tolist()
    assert torch.equal(model.generate(ids), expected)


def test_encoder_decoder(models: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(models / "t5")
    model = AutoModelForSeq2SeqLM.from_pretrained(models / "t5")
    reference = transformers.AutoModelForSeq2SeqLM.from_pretrained(models / "t5").eval()
    inputs = tokenizer(TEXTS, return_tensors="pt", padding=True)
    assert torch.equal(
        model.generate(**inputs, num_beams=3), reference.generate(**inputs, num_beams=3, max_new_tokens=20)
    )
    targets = torch.tensor([[0, 7, 9, 11], [0, 30, 31, 32]])
    ours = model(**inputs, decoder_input_ids=targets, output_hidden_states=True, output_attentions=True)
    theirs = reference(**inputs, decoder_input_ids=targets, output_hidden_states=True)
    assert torch.allclose(ours.logits, theirs.logits, atol=1e-4)
    real = inputs.attention_mask.bool()
    assert torch.allclose(ours.encoder_last_hidden_state[real], theirs.encoder_last_hidden_state[real], atol=1e-4)
    assert len(ours.decoder_hidden_states) == len(theirs.decoder_hidden_states)
    again = model(**inputs, decoder_input_ids=targets[:, :3])
    step = model(decoder_input_ids=targets[:, 3:], past_key_values=again.past_key_values)
    assert torch.allclose(step.logits[:, 0], theirs.logits[:, 3], atol=1e-3)
    states = model(encoder_outputs=(theirs.encoder_last_hidden_state,), **inputs, decoder_input_ids=targets)
    assert torch.allclose(states.logits, theirs.logits, atol=1e-4)


def test_speech(models: Path) -> None:
    model = AutoModelForSpeechSeq2Seq.from_pretrained(models / "whisper")
    reference = transformers.AutoModelForSpeechSeq2Seq.from_pretrained(models / "whisper").eval()
    shape = unspool.load(models / "whisper").model.info.features
    features = torch.randn(1, shape.channels, shape.frames, generator=torch.Generator().manual_seed(1))
    ids = torch.tensor([[3, 8, 9]])
    expected = reference(features, decoder_input_ids=ids).logits
    assert torch.allclose(model(input_features=features, decoder_input_ids=ids).logits, expected, atol=1e-3)
    cache = unspool.EncoderDecoderCache(unspool.DynamicCache(), unspool.DynamicCache())
    filled = model(input_features=features, decoder_input_ids=ids, past_key_values=cache, use_cache=True)
    assert filled.past_key_values is cache and cache.get_seq_length() == 3
    assert model.main_input_name == "input_features"


def test_a_class_refuses_models_of_another_kind(models: Path) -> None:
    for kind, name, right in (
        (AutoModelForCausalLM, "t5", "AutoModelForSeq2SeqLM"),
        (AutoModelForSeq2SeqLM, "llama", "AutoModelForCausalLM"),
        (AutoModelForSeq2SeqLM, "whisper", "AutoModelForSpeechSeq2Seq"),
        (AutoModelForSpeechSeq2Seq, "t5", "AutoModelForSeq2SeqLM"),
    ):
        with pytest.raises(LoadError, match=f"load it with {right}"):
            kind.from_pretrained(models / name)
    with pytest.raises(TypeError, match="from_pretrained"):
        AutoTokenizer()
    with pytest.raises(UnsupportedError, match="weights"):
        AutoModelForCausalLM.from_config({})


HARMLESS = {"use_safetensors": True}
APPLIED: dict[str, Any] = {
    "dtype": torch.float32,
    "torch_dtype": torch.float32,
    "device_map": {"": "cpu"},
    "max_memory": None,
    "device": "cpu",
    "load_in_8bit": False,
    "load_in_4bit": False,
    "quantize": None,
    "quantization_config": None,
    "threads": None,
    "native": True,
    "progress": None,
    "revision": "v2.0",
    "token": None,
    "use_auth_token": None,
    "cache_dir": None,
    "force_download": False,
    "local_files_only": True,
    "subfolder": "",
    "gguf_file": None,
    "generation_config": unspool.GenerationConfig(max_new_tokens=3),
    "pad_token_id": 0,
}


def test_every_keyword_of_a_model(models: Path) -> None:
    """Applied ones, those without effect and harmless values of refused ones load; the rest are refused by name."""
    given = {name: "x" for name, keyword in MODEL_KEYWORDS.items() if keyword.fate == "without effect"}
    given |= {name: False for name, keyword in MODEL_KEYWORDS.items() if keyword.fate == "refused"} | HARMLESS
    applied = {name: value for name, value in APPLIED.items() if name != "device"}
    assert set(APPLIED) >= {name for name, keyword in MODEL_KEYWORDS.items() if keyword.fate == "applied"}
    model = AutoModelForCausalLM.from_pretrained(models / "llama", **given, **applied)
    assert model.generate(torch.tensor([[5, 6]])).shape == (1, 5)
    for name, keyword in MODEL_KEYWORDS.items():
        if keyword.fate == "refused":
            with pytest.raises(UnsupportedError, match=name):
                AutoModelForCausalLM.from_pretrained(models / "llama", **{name: "x"})


def test_settings_among_the_keywords(models: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(models / "llama", max_new_tokens=4, num_beams=2, pad_token_id=0)
    assert model.generation_config.num_beams == 2
    assert model.generate(torch.tensor([[5, 6]])).shape == (1, 6)
    with pytest.raises(SettingError, match="did you mean 'device_map'"):
        AutoModelForCausalLM.from_pretrained(models / "llama", device_maps="auto")
    with pytest.raises(SettingError, match="one name or path"):
        AutoModelForCausalLM.from_pretrained(models / "llama", "main")


def test_weights_in_blocks(models: Path) -> None:
    for given in (
        {"load_in_4bit": True, "device_map": "auto"},
        {"quantization_config": {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.bfloat16}},
        {"quantization_config": unspool.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")},
        {"quantization_config": transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=True)},
        {"quantization_config": unspool.BitsAndBytesConfig(load_in_8bit=True)},
    ):
        model = AutoModelForCausalLM.from_pretrained(models / "llama", **given)
        blocks = given.get("quantization_config")
        name = blocks.get("bnb_4bit_quant_type", "fp4") if isinstance(blocks, dict) else ""
        is_whole = blocks is not None and not isinstance(blocks, dict) and blocks.load_in_8bit
        asked = "int4" if blocks is None else "int8" if is_whole else name or blocks.bnb_4bit_quant_type
        assert model.core.weights.layers[0].up.kind == asked
        assert model.generate(torch.tensor([[5, 6]]), max_new_tokens=2).shape == (1, 4)
    for wrong, words in (
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"quantization_config": {"load_in_2bit": True}}, "load_in_2bit"),
        ({"quantization_config": {"llm_int8_skip_modules": ["lm_head"]}}, "all matrices"),
        ({"quantization_config": {"load_in_4bit": True}, "load_in_8bit": True}, "give one"),
        ({"quantization_config": 4}, "BitsAndBytesConfig"),
        ({"quantization_config": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf5"}}, "nf4 or fp4"),
        ({"quantization_config": {"load_in_4bit": True, "bnb_4bit_quant_storage": "bfloat16"}}, "quant_storage"),
        ({"quantization_config": {"load_in_8bit": True, "llm_int8_threshold": 3.0}}, "threshold=3.0"),
        ({"quantization_config": {"load_in_4bit": True}, "quantize": "int8"}, "different things"),
    ):
        with pytest.raises((SettingError, UnsupportedError), match=words):
            AutoModelForCausalLM.from_pretrained(models / "llama", **wrong)
    with pytest.raises(SettingError, match="one of them"):
        unspool.BitsAndBytesConfig(load_in_4bit=True, load_in_8bit=True)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"device_map": {"a": "cpu", "b": "cuda:77"}}, "there is no device"),
        ({"device_map": 1.5}, "not a device"),
        ({"device_map": "cpu", "device": "cpu"}, "give one"),
        ({"dtype": "float32", "torch_dtype": "float16"}, "two names"),
        ({"token": "a", "use_auth_token": "b"}, "two names"),
        ({"generation_config": 3}, "GenerationConfig"),
        ({"subfolder": "../t5"}, "leads out"),
        ({"subfolder": "nosuch"}, "has no 'nosuch'"),
    ],
)
def test_values_that_cannot_be(models: Path, given: dict[str, Any], words: str) -> None:
    with pytest.raises((SettingError, UnsupportedError, LoadError), match=words):
        AutoModelForCausalLM.from_pretrained(models / "llama", **given)


def test_places(models: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(models, subfolder="llama", device_map="cpu")
    assert model.config.model_type == "llama" and model.hf_device_map == {"": "cpu"}
    assert AutoTokenizer.from_pretrained(models, subfolder="llama").eos_token_id == 2
    with pytest.raises(UnsupportedError, match="top of a repository"):
        AutoModelForCausalLM.from_pretrained("owner/name", subfolder="x")


def test_every_keyword_of_a_tokenizer(models: Path) -> None:
    given = {name: "x" for name, keyword in TOKENIZER_KEYWORDS.items() if keyword.fate == "without effect"}
    given |= {name: None for name, keyword in TOKENIZER_KEYWORDS.items() if keyword.fate == "refused"}
    tokenizer = AutoTokenizer.from_pretrained(
        models / "llama",
        **given,
        truncation_side="left",
        model_max_length=3,
        pad_token="</s>",
        chat_template="{{ messages[0].content }}",
        clean_up_tokenization_spaces=True,
    )
    assert tokenizer.pad_token_id == 2 and tokenizer.clean_up_tokenization_spaces
    assert tokenizer("abcxyz", truncation=True).input_ids == tokenizer.encode("xyz")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False) == "a"
    for name, keyword in TOKENIZER_KEYWORDS.items():
        if keyword.fate == "refused":
            with pytest.raises(UnsupportedError, match=name):
                AutoTokenizer.from_pretrained(models / "llama", **{name: "x"})
    with pytest.raises(SettingError, match="did you mean 'padding_side'"):
        AutoTokenizer.from_pretrained(models / "llama", padding_sides="left")
    with pytest.raises(SettingError, match="no language codes"):
        AutoTokenizer.from_pretrained(models / "llama", src_lang="de_DE")


def test_prefix_space(models: Path) -> None:
    plain = AutoTokenizer.from_pretrained(models / "gpt2")
    spaced = AutoTokenizer.from_pretrained(models / "gpt2", add_prefix_space=True)
    assert spaced.encode("a") == plain.encode(" a") != plain.encode("a")


def test_a_short_name(default_model_file: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(default_model_file)
    model = AutoModelForCausalLM.from_pretrained(str(default_model_file.parent), gguf_file=default_model_file.name)
    out = model.generate(**tokenizer("The capital of France is", return_tensors="pt"), max_new_tokens=2)
    assert "Paris" in tokenizer.decode(out[0])


def test_what_a_model_answers(llama: Any) -> None:
    assert llama.to("cpu") is llama and llama.eval() is llama and llama.float() is llama
    assert llama.device.type == "cpu" and llama.dtype == torch.float32
    assert llama.num_parameters() * 4 == llama.get_memory_footprint()
    assert sum(parameter.numel() for parameter in llama.parameters()) == llama.num_parameters()
    assert next(llama.parameters()).device == llama.device and not llama.training
    assert llama.get_input_embeddings()(torch.tensor([1])).shape[-1] == llama.config.hidden_size
    assert "llama" in repr(llama)
    with pytest.raises(UnsupportedError, match="only infers"):
        llama.train()
    with pytest.raises(UnsupportedError, match="gradients"):
        llama.requires_grad_()
    with pytest.raises(UnsupportedError, match="generation_config"):
        llama.save_pretrained("x")
    with pytest.raises(UnsupportedError, match="training"):
        llama(torch.tensor([[1]]), labels=torch.tensor([[1]]))
    with pytest.raises(UnsupportedError, match="cache_position"):
        llama(torch.tensor([[1]]), cache_position=torch.tensor([3]))
    output = llama.generate(torch.tensor([[5, 6]]), max_new_tokens=3, return_dict_in_generate=True, output_scores=True)
    scores = llama.compute_transition_scores(output.sequences, output.scores, normalize_logits=True)
    assert scores.shape == (1, 3) and bool((scores <= 0).all())
    assert llama.as_language_model().generate("The sea", max_new_tokens=3).text


def test_a_folder_without_a_native_model(models: Path, tmp_path: Path) -> None:
    config = transformers.StableLmConfig(
        vocab_size=160, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    reference = transformers.StableLmForCausalLM(config).eval()
    reference.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(model.generate(ids), reference.generate(ids, max_new_tokens=20))
    assert torch.allclose(model(ids).logits, reference(ids).logits)


def test_set_seed(llama: Any) -> None:
    drawn = []
    for seed in (7, 7, 8):
        set_seed(seed)
        drawn.append(
            (
                random.random(),
                np.random.rand(),
                llama.generate(torch.tensor([[5, 6]]), do_sample=True, max_new_tokens=9).tolist(),
            )
        )
    assert drawn[0] == drawn[1] != drawn[2]
    with pytest.raises(SettingError, match="whole number"):
        set_seed(-1)


def test_the_documents_list_every_keyword() -> None:
    text = (Path(__file__).parents[2] / "docs" / "transformers.md").read_text(encoding="utf-8")
    for table in (MODEL_KEYWORDS, TOKENIZER_KEYWORDS):
        for keyword in table.values():
            assert f"| `{keyword.name}` | {keyword.fate} | {keyword.words} |" in text
