"""Pipelines answer as transformers' do on the same folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from tests.speech.models import save_speech_model

import unspool
from unspool import AutoModelForCausalLM, AutoTokenizer, TextStreamer, pipeline
from unspool.errors import InputError, SettingError, UnsupportedError

GREEDY = {"do_sample": False, "max_new_tokens": 12}
CHAT = [{"role": "user", "content": "What is the sea?"}]


@pytest.fixture(scope="module")
def pipe(models: Path) -> Any:
    return pipeline("text-generation", model=str(models / "llama"))


@pytest.fixture(scope="module")
def reference(models: Path) -> Any:
    return transformers.pipeline("text-generation", model=str(models / "llama"))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"return_full_text": False},
        {"return_tensors": True},
        {"num_beams": 3, "num_return_sequences": 2},
        {"prefix": "In short: "},
        {"skip_special_tokens": False},
        {"stop_sequence": "e"},
    ],
    ids=str,
)
@pytest.mark.parametrize("inputs", ["The sea is", ["The sea is", "A rock"], CHAT, [CHAT, [*CHAT, *CHAT]]], ids=type)
def test_text_generation(pipe: Any, reference: Any, inputs: Any, options: dict[str, Any]) -> None:
    assert pipe(inputs, **GREEDY, **options) == reference(inputs, **GREEDY, **options)


def test_a_last_message_of_the_assistant_is_continued(pipe: Any) -> None:
    chat = [*CHAT, {"role": "assistant", "content": "The sea is"}]
    (found,) = pipe(chat, **GREEDY)
    text = "user: What is the sea?\nassistant: The sea is"
    (expected,) = pipe(text, **GREEDY, return_full_text=False)
    assert found["generated_text"] == [
        *CHAT,
        {"role": "assistant", "content": f"The sea is{expected['generated_text']}"},
    ]
    (new,) = pipe(chat, **GREEDY, continue_final_message=False)
    assert new["generated_text"][-1]["role"] == "assistant" and len(new["generated_text"]) == 3


def test_batches_and_generators_answer_as_one_by_one(pipe: Any) -> None:
    texts = ["The sea is", "A", "A lighthouse on a rock"]
    alone = [pipe(text, **GREEDY) for text in texts]
    assert pipe(texts, batch_size=2, **GREEDY) == alone
    lazy = pipe((text for text in texts), batch_size=2, **GREEDY)
    assert not isinstance(lazy, list) and list(lazy) == alone


def test_defaults_are_below_the_models_own(models: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(models / "llama", do_sample=False, max_new_tokens=3)
    tokenizer = AutoTokenizer.from_pretrained(models / "llama")
    calm = pipeline("text-generation", model, tokenizer)
    assert len(calm("ab", return_tensors=True)[0]["generated_token_ids"]) == 2 + 3
    assert len(calm("ab", return_tensors=True, max_length=9)[0]["generated_token_ids"]) == 9
    drawn = pipeline("text-generation", str(models / "llama"), seed=3)
    texts = {drawn("ab", seed=seed)[0]["generated_text"] for seed in (1, 1, 2)}
    assert len(texts) == 2  # sampled, unless something says otherwise


def test_models_of_every_kind(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = models / "llama"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    found = [
        pipeline("text-generation", unspool.load(folder)),
        pipeline("text-generation", AutoModelForCausalLM.from_pretrained(folder), device=-1),
        pipeline("text-generation", theirs, tokenizer),
        pipeline("text-generation", theirs),  # its tokenizer is found beside it
        pipeline(model=theirs, tokenizer=transformers.AutoTokenizer.from_pretrained(folder)),
        pipeline("text-generation", str(folder), tokenizer=str(folder), assistant_model=str(models / "llama_draft")),
        pipeline("text-generation", str(folder), dtype="float32", device_map="cpu", model_kwargs={"threads": 1}),
    ]
    capsys.readouterr()
    texts = {each("The sea is", **GREEDY)[0]["generated_text"] for each in found}
    assert len(texts) == 1
    found[0]("The sea is", **GREEDY, streamer=TextStreamer(tokenizer, skip_special_tokens=True))
    assert capsys.readouterr().out.strip() == texts.pop().strip()


def test_the_context_is_kept_free(pipe: Any) -> None:
    long = "the sea " * 20
    (found,) = pipe(long, do_sample=False, max_new_tokens=8, handle_long_generation="hole", return_tensors=True)
    assert len(found["generated_token_ids"]) == 64  # the tokenizer's model_max_length
    (cut,) = pipe(long, do_sample=False, max_new_tokens=8, return_tensors=True, truncation=True)
    assert len(cut["generated_token_ids"]) == 72
    with pytest.raises(SettingError, match="no room"):
        pipe(long, do_sample=False, max_new_tokens=64, handle_long_generation="hole")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda p: p("a", nosuch=1), "nosuch"),
        (lambda p: p(3), "a text or a list of texts"),
        (lambda p: p("a", batch_size=0.5), "batch_size"),
        (lambda p: p("a", return_full_text=True, return_tensors=True), "exclude each other"),
        (lambda p: p("a", handle_long_generation="cut"), "'hole'"),
        (lambda p: pipeline("fill-mask", p.model), "text-generation"),
        (lambda p: pipeline("text-generation", p.model, image_processor=1), "image_processor"),
        (lambda p: pipeline(model="x"), "say what"),
        (lambda p: pipeline("text-generation", p.model, device="cpu", device_map="cpu"), "give one"),
        (lambda p: pipeline("text-generation", p.model, model_kwargs={"nosuch": 1}), "nosuch"),
        (lambda p: pipeline("text-generation", p.model, assistant_tokenizer="x"), "assistant_model"),
    ],
)
def test_what_cannot_be(pipe: Any, call: Any, words: str) -> None:
    with pytest.raises((SettingError, InputError, UnsupportedError), match=words):
        call(pipe)


def test_text_to_text(models: Path, tmp_path: Path) -> None:
    folder = models / "t5"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = unspool.AutoModelForSeq2SeqLM.from_pretrained(folder)
    ids = tokenizer("A cat", return_tensors="pt").input_ids
    long, short = (
        tokenizer.decode(model.generate(ids, num_beams=4, max_new_tokens=most)[0], skip_special_tokens=True)
        for most in (256, 12)
    )
    for task, name in (
        ("text2text-generation", "generated_text"),
        ("summarization", "summary_text"),
        ("translation", "translation_text"),
        ("translation_en_to_de", "translation_text"),
    ):
        each = pipeline(task, str(folder))
        assert each("A cat", max_new_tokens=12) == [{name: short}]
        assert each(["A cat", "A longer text"], batch_size=2, max_new_tokens=12)[0] == {name: short}
    assert long != short and each("A cat") == [{name: long}]
    (row,) = each("A cat", return_tensors=True, num_beams=1, max_new_tokens=4)
    assert row["translation_token_ids"] == model.generate(ids, max_new_tokens=4)[0].tolist()
    with pytest.raises(SettingError, match="translation"):
        pipeline("summarization", model, tokenizer)("A", src_lang="de")
    # A config may have a prefix and settings for a task.
    model.config.task_specific_params = {"summarization": {"prefix": "A ", "max_length": 5, "num_beams": 1}}
    own = pipeline("summarization", model, tokenizer)
    assert own("cat", return_tensors=True)[0]["summary_token_ids"] == model.generate(ids, max_length=5)[0].tolist()


def test_speech(tmp_path: Path) -> None:
    save_speech_model(tmp_path)
    pipe = pipeline("automatic-speech-recognition", str(tmp_path))
    sound = np.random.default_rng(1).normal(size=16_000).astype(np.float32) * 0.1
    given = {"language": "en"}
    found = pipe({"raw": sound, "sampling_rate": 16_000}, generate_kwargs=given, chunk_length_s=30)
    lm = unspool.load(tmp_path)
    expected = lm.transcribe(sound, language="en", return_timestamps=True)
    assert found == {"text": lm.transcribe(sound, language="en").text}
    assert pipe([sound, sound], generate_kwargs=given) == [found, found]
    timed = pipe(sound, generate_kwargs=given, return_timestamps=True)
    assert timed["chunks"] == [{"timestamp": (one.start, one.end), "text": one.text} for one in expected.segments]
    words = pipe(sound, generate_kwargs=given, return_timestamps="word")
    assert "".join(chunk["text"] for chunk in words["chunks"]).strip() == words["text"]
    with pytest.raises(SettingError, match="input_features"):
        pipeline("automatic-speech-recognition", object(), tokenizer=object())


def test_presets_in_the_program(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from unspool.cli.main import main

    folder = tmp_path / "llama"
    folder.mkdir()
    for path in (models / "llama").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    unspool.GenerationConfig(max_new_tokens=4, num_beams=2).save_pretrained(folder, "translation.json")
    assert unspool.GenerationConfig.from_pretrained(folder, "translation.json").num_beams == 2
    call = ["run", "-m", str(folder), "--json", "The sea"]
    assert main([*call, "--preset", "translation"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["preset"] == "translation"
    expected = unspool.load(folder).generate("The sea", max_new_tokens=4, num_beams=2)
    assert report["texts"] == expected.texts
    assert main([*call, "--preset", str(folder / "translation.json"), "--max-new-tokens", "2"]) == 0
    assert report["texts"][0].startswith("") and len(json.loads(capsys.readouterr().out)["token_ids"][0]) == 2
    assert main([*call, "--preset", "transltion"]) == 2
    assert "did you mean 'translation'" in capsys.readouterr().err
    (folder / "odd.json").write_text('{"num_beam": 2, "top_k": 3, "zzz": 1}')
    assert main([*call, "--preset", "odd"]) == 2
    message = capsys.readouterr().err
    assert '"num_beam" (did you mean' in message and '"zzz"' in message
    (folder / "scores.json").write_text('{"output_scores": true, "return_dict_in_generate": true}')
    assert main([*call, "--preset", "scores"]) == 2
