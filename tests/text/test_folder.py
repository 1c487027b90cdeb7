"""Tokenizers from folders, and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from unspool.errors import LoadError, ModelNotFoundError, UnsupportedError
from unspool.text import Tokenizer

TEXTS = ["Hello, world!", " 12  34", "日本語 👍", "<|im_start|>user\n", "the cat"]


@pytest.mark.parametrize("name", ["smollm2", "sentencepiece"])
def test_save_and_read_back(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    tokenizer.save(tmp_path / "new")
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["tokenizer.json", "tokenizer_config.json"]
    again = Tokenizer.from_folder(tmp_path / "new")
    assert again.get_vocab() == tokenizer.get_vocab()
    assert again.special_tokens_map == tokenizer.special_tokens_map
    assert again.all_special_ids == tokenizer.all_special_ids
    assert again.chat_template == tokenizer.chat_template
    for text in TEXTS:
        assert again.encode(text) == tokenizer.encode(text)
        assert again.decode(again.encode(text), skip_special_tokens=True) == tokenizer.decode(
            tokenizer.encode(text), skip_special_tokens=True
        )


def test_transformers_reads_what_is_saved_and_the_other_way(smollm2: Tokenizer, tmp_path: Path) -> None:
    import transformers

    smollm2.save(tmp_path / "ours")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs")
    again = Tokenizer.from_folder(tmp_path / "theirs")
    messages = [{"role": "user", "content": "Hi"}]
    for text in TEXTS:
        assert theirs.encode(text) == again.encode(text) == smollm2.encode(text)
    assert theirs.eos_token_id == again.eos_token_id == smollm2.eos_token_id
    assert again.apply_chat_template(messages) == smollm2.apply_chat_template(messages)


def write_vocabulary(folder: Path, config: dict[str, Any]) -> None:
    from tokenizers.pre_tokenizers import ByteLevel

    letters = sorted(ByteLevel.alphabet())
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "hello")]
    tokens = [*letters, *(left + right for left, right in merges), "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({token: index for index, token in enumerate(tokens)}))
    lines = ["#version: 0.2", *(" ".join(pair) for pair in merges), ""]
    (folder / "merges.txt").write_text("\n".join(lines), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def test_vocabulary_and_merges_equal_gpt2(tmp_path: Path) -> None:
    import transformers

    write_vocabulary(tmp_path, {"eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>"})
    tokenizer = Tokenizer.from_folder(tmp_path)
    reference = transformers.GPT2Tokenizer.from_pretrained(tmp_path)
    for text in ["hello hello", "HELLO 123  x\n", "日本語", "a<|endoftext|>b", ""]:
        assert tokenizer.encode(text) == reference.encode(text), text
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.eos_token_id == tokenizer.bos_token_id == 261
    assert tokenizer.all_special_tokens == ["<|endoftext|>"]


def test_vocabulary_and_merges_with_settings(tmp_path: Path) -> None:
    write_vocabulary(
        tmp_path,
        {
            "bos_token": {"content": "<|endoftext|>"},
            "add_bos_token": True,
            "add_prefix_space": True,
            "added_tokens_decoder": {"262": {"content": "<extra>", "special": False, "lstrip": True}},
            "additional_special_tokens": ["<more>"],
            "extra_special_tokens": {"image_token": "<image>"},
        },
    )
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("hello")) == ["<|endoftext|>", "Ġhello"]
    assert tokenizer.convert_tokens_to_ids(["<extra>", "<more>", "<image>"]) == [262, 263, 264]
    assert tokenizer.decode([262, 263, 264], skip_special_tokens=True) == "<extra>"


def test_templates_wherever_they_are(smollm2: Tokenizer, tmp_path: Path) -> None:
    smollm2.save(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": named}))
    several = Tokenizer.from_folder(tmp_path)
    assert several.chat_template == {"default": "D", "tool_use": "T"}
    several.save(tmp_path / "again")
    assert Tokenizer.from_folder(tmp_path / "again").chat_template == several.chat_template
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "J"}))
    assert Tokenizer.from_folder(tmp_path).chat_template == "J"
    (tmp_path / "chat_template.jinja").write_text("F")
    assert Tokenizer.from_folder(tmp_path).chat_template == "F"


def test_special_tokens_map_alone(sentencepiece: Tokenizer, tmp_path: Path) -> None:
    sentencepiece.save(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": {"content": "</s>"}, "pad_token": "<unk>"}')
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id) == (2, 0, None)


@pytest.mark.parametrize(
    ("files", "error", "words"),
    [
        ({}, ModelNotFoundError, "no tokenizer"),
        ({"tokenizer.model": "x"}, UnsupportedError, "unknown kind"),
        ({"tokenizer.json": "{"}, LoadError, "not a tokenizer|not valid JSON"),
        ({"tokenizer.json": "[]"}, LoadError, "an object was expected"),
        ({"tokenizer.json": '{"model": {"type": "BPE"}}'}, LoadError, "not a tokenizer|not valid JSON"),
        ({"vocab.json": "{}", "merges.txt": ""}, LoadError, "id of 0 or more"),
        ({"vocab.json": '{"a": -1}', "merges.txt": ""}, LoadError, "id of 0 or more"),
        ({"vocab.json": '{"a": "b"}', "merges.txt": ""}, LoadError, "id of 0 or more"),
        ({"vocab.json": '{"\\ud800": 0}', "merges.txt": ""}, LoadError, "not valid Unicode"),
        ({"vocab.json": "[" * 100_000, "merges.txt": ""}, LoadError, "not valid JSON"),
        ({"vocab.json": '["a"]', "merges.txt": ""}, LoadError, "an object was expected"),
        ({"vocab.json": '{"a": 0}', "merges.txt": "a b c"}, LoadError, "two tokens"),
        ({"vocab.json": '{"a": 0}', "merges.txt": "a b"}, LoadError, "don't fit"),
        ({"vocab.json": '{"a": 0}', "merges.txt": b"\xff\xfe"}, LoadError, "UTF-8"),
        ({"tokenizer_config.json": '{"eos_token": 3}'}, LoadError, "eos_token"),
        ({"tokenizer_config.json": '{"additional_special_tokens": 3}'}, LoadError, "must be a list"),
        ({"tokenizer_config.json": '{"added_tokens_decoder": {"x": 3}}'}, LoadError, "added_tokens_decoder"),
        ({"tokenizer_config.json": '{"added_tokens_decoder": {"7": {"content": "<n>"}}}'}, LoadError, "the id 7"),
        ({"tokenizer_config.json": '{"chat_template": 3}'}, LoadError, "chat_template"),
    ],
)
def test_damaged_folders(
    files: dict[str, str | bytes], error: type[Exception], words: str, sentencepiece: Tokenizer, tmp_path: Path
) -> None:
    if "tokenizer_config.json" in files:
        sentencepiece.save(tmp_path)
    for name, content in files.items():
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(error, match=words):
        Tokenizer.from_folder(tmp_path)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="no folder"):
        Tokenizer.from_folder(tmp_path / "nosuch")


def test_sizes_are_bounded(sentencepiece: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sentencepiece.save(tmp_path)
    monkeypatch.setattr("unspool.text.folder.MAX_TOKENIZER_BYTES", 100)
    with pytest.raises(LoadError, match="larger than 100 bytes"):
        Tokenizer.from_folder(tmp_path)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_tokenizer_json_is_read_or_refused(
    data: st.DataObject, sentencepiece: Tokenizer, tmp_path: Path
) -> None:
    content = bytearray(sentencepiece.backend_tokenizer.to_str().encode())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    (tmp_path / "tokenizer.json").write_bytes(content)
    try:
        tokenizer = Tokenizer.from_folder(tmp_path)
    except LoadError:
        return
    assert isinstance(tokenizer.decode(tokenizer.encode("the cat", add_special_tokens=False)), str)
