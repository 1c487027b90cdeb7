from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from unspool.errors import LoadError, ModelNotFoundError, SettingError
from unspool.loading import catalogue
from unspool.loading import source as source_module
from unspool.loading.source import open_source


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    save_file({"w": torch.ones(2, 3)}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return path


def test_a_folder(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.5}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "modeling_evil.py").write_text("raise SystemExit")
    found = open_source(folder)
    assert (found.location, found.kind) == (folder, "folder")
    assert found.config == {"model_type": "llama"} and found.generation_config == {"temperature": 0.5}
    names = ("tokenizer.json", "chat_template.jinja")
    assert found.files == {name: folder / name for name in names}
    assert found.tensors.read("w", dtype=torch.float32).sum() == 6
    assert open_source(str(folder)).config == found.config


def test_no_generation_config_is_an_empty_one(folder: Path) -> None:
    assert open_source(folder).generation_config == {}


def test_a_folder_without_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(LoadError, match=r"no config\.json"):
        open_source(folder)


BAD_CONFIGS = {
    "cut": ('{"a": ', "not valid JSON"),
    "list": ("[1]", "an object was expected"),
    "nan": ('{"a": NaN}', "NaN"),
    "infinity": ('{"a": -Infinity}', "Infinity"),
    "twice": ('{"a": 1, "a": 2}', "'a' occurs twice"),
    "large": ('{"a": "' + "x" * (16 << 20) + '"}', "larger than 16777216 bytes"),
}


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("case", BAD_CONFIGS)
def test_bad_json_is_refused(folder: Path, name: str, case: str) -> None:
    text, message = BAD_CONFIGS[case]
    (folder / name).write_text(text)
    if (name, case) == ("generation_config.json", "infinity"):  # a token's bias may be that
        assert open_source(folder).generation_config == {"a": float("-inf")}
        return
    with pytest.raises(LoadError, match=message) as caught:
        open_source(folder)
    assert name in str(caught.value)


def test_a_gguf_file_and_a_folder_with_one(write_gguf: Callable[..., Path]) -> None:
    metadata: dict[str, object] = {
        "general.architecture": "llama",
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 7,
        "tokenizer.ggml.eom_token_id": 2,
        "tokenizer.ggml.padding_token_id": 2**32 - 1,
        "tokenizer.ggml.unknown_token_id": 0,
        "general.sampling.temp": 0.5,
        "general.sampling.top_k": 40,
        "general.sampling.top_p": 0.75,
        "general.sampling.min_p": 0.125,
    }
    path = write_gguf(metadata)
    for found in (open_source(path), open_source(path.parent)):
        assert (found.location, found.kind, found.files) == (path, "gguf", {})
        assert found.config == metadata
        assert found.generation_config == {
            "bos_token_id": 1,
            "eos_token_id": [2, 7],
            "unk_token_id": 0,
            "temperature": 0.5,
            "top_k": 40,
            "top_p": 0.75,
            "min_p": 0.125,
        }


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tokenizer.ggml.eos_token_id", "2"),
        ("tokenizer.ggml.bos_token_id", 2**31),
        ("tokenizer.ggml.bos_token_id", True),
        ("tokenizer.ggml.bos_token_id", [1]),
        ("general.sampling.temp", "hot"),
        ("general.sampling.top_p", float("inf")),
    ],
)
def test_gguf_settings_of_the_wrong_kind_are_refused(write_gguf: Callable[..., Path], key: str, value: object) -> None:
    with pytest.raises(LoadError, match="which is not a"):
        open_source(write_gguf({key: value}))


def test_several_ggufs_in_a_folder_need_a_choice(write_gguf: Callable[..., Path]) -> None:
    path = write_gguf()
    path.with_name("other.gguf").write_bytes(path.read_bytes())
    with pytest.raises(LoadError, match=r"2 GGUF files.*model\.gguf, other\.gguf"):
        open_source(path.parent)


@pytest.mark.parametrize(
    ("name", "message"),
    [("model.safetensors", "Give the folder it lies in"), ("x.bin", "is a pickle"), ("x.txt", "a .gguf file")],
)
def test_other_files_are_refused(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(LoadError, match=message):
        open_source(tmp_path / name)


@pytest.mark.parametrize("name", ["smollm2-135m", "smollm2", "default", "SmolLM2-135M"])
def test_short_names(default_model: Path, name: str) -> None:
    assert open_source(name).location == default_model


def test_a_short_name_that_is_not_installed_says_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_module, "find_model", lambda name: None)
    with pytest.raises(ModelNotFoundError, match="unspool pull smollm2-135m"):
        open_source("default")


@pytest.mark.parametrize("name", ["./absent", "/absent/model.gguf", "a/b/c", "../x", "~nobody-here/x", "absent.gguf"])
def test_missing_paths_are_told_as_such(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match=f"there is no folder and no file '{name}'"):
        open_source(name)


@pytest.mark.parametrize("name", ["smolm2-135", "x" * 5000, "a:b"])
def test_unknown_names_say_what_was_looked_for(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match="nor a short name") as caught:
        open_source(name)
    assert f"unspool pull {catalogue.DEFAULT_MODEL}" in str(caught.value)
    assert len(str(caught.value)) < 700
    if name == "smolm2-135":
        assert "Did you mean 'smollm2-135m'?" in str(caught.value)


@pytest.mark.parametrize("name", ["", "a\0b"])
def test_empty_names_are_refused(name: str) -> None:
    with pytest.raises(ModelNotFoundError):
        open_source(name)


def test_hub_ids_are_fetched(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def fetch(repo_id: str, revision: str | None, filename: str | None, offline: bool | None, **_: Any) -> Path:
        asked.append((repo_id, revision, filename, offline))
        return folder

    monkeypatch.setattr(source_module, "fetch", fetch)
    assert open_source("owner/name", revision="v1", offline=True).location == folder
    assert open_source("owner/name:q4.gguf").location == folder
    assert asked == [("owner/name", "v1", None, True), ("owner/name", None, "q4.gguf", None)]


def test_a_revision_belongs_to_hub_ids(folder: Path) -> None:
    for name in (folder, "smollm2"):
        with pytest.raises(SettingError, match="revision='v1'"):
            open_source(name, revision="v1")


@pytest.mark.parametrize("kind", ["pipe", "device", "socket", "folder"])
def test_what_is_no_file_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "model.gguf"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    else:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(path))
    with pytest.raises(LoadError, match="holds no weights" if kind == "folder" else "can't be read"):
        open_source(path)
