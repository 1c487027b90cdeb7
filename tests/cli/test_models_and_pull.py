"""`unspool models` and `unspool pull`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from unspool.cli import models, pull
from unspool.cli.console import format_size
from unspool.errors import LoadError
from unspool.loading.catalogue import available_models


def test_models_that_are_installed(cli: Callable[..., Any], default_model_file: Path) -> None:
    ended = cli("models")
    heading, row, path, *rest = ended.out.splitlines()
    assert ended.code == 0 and heading.split() == ["name", "model", "size", "licence", "status"]
    for part in ("smollm2-135m", "SmolLM2 135M Instruct (Q4_1)", "98 MB", "Apache-2.0", "installed"):
        assert part in row
    assert path.strip().endswith(default_model_file.name)
    assert rest[0].split()[:3] == ["whisper-tiny.en", "Whisper", "tiny.en,"] and "MIT" in rest[0]


def test_models_that_are_not(cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "installed_models", dict)
    _, *rows = cli("models").out.splitlines()
    assert [row.split("  ")[-1].strip() for row in rows] == [
        f"unspool pull {entry.name}" for entry in available_models()
    ]
    for listed in json.loads(cli("models", "--json").out):
        assert listed["installed"] is False and listed["path"] is None


def test_models_as_json(cli: Callable[..., Any], default_model_file: Path) -> None:
    ended = cli("models", "--json")
    entry = available_models()[0]
    assert ended.err == "" and json.loads(ended.out)[:1] == [
        {
            "name": entry.name,
            "aliases": list(entry.aliases),
            "title": entry.title,
            "parameters": entry.parameters,
            "size_bytes": entry.size_bytes,
            "licence": entry.licence,
            "default": True,
            "installed": True,
            "path": str(default_model_file),
            "pull": "unspool pull smollm2-135m",
        }
    ]


def test_pulling_what_is_here(cli: Callable[..., Any], default_model_file: Path) -> None:
    ended = cli("pull", "smollm2-135m")
    assert (ended.code, ended.out) == (0, f"{default_model_file}\n")
    assert ended.err == "smollm2-135m is here already:\n"


def test_pulling_says_each_stage_once_in_a_pipe(cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(name: str, progress: Callable[[str, int, int], None]) -> Path:
        for stage in ("download", "extract"):
            for done in range(0, 98_000_001, 1_000_000):
                progress(stage, done, 98_000_000)
        return Path("/models") / name

    monkeypatch.setattr(pull, "pull", fetch)
    ended = cli("pull", "tiny")
    assert (ended.code, ended.out) == (0, "/models/tiny\n")
    assert ended.err.splitlines() == [
        "downloading tiny (98 MB) …",
        "unpacking and checking tiny (98 MB) …",
        "tiny is here:",
    ]


def test_pulling_what_there_is_not(cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    ended = cli("pull", "smolm2-135m")
    assert ended.code == 2 and ended.out == "" and "Did you mean 'smollm2-135m'?" in ended.err

    def fail(_name: str, _progress: object) -> Path:
        raise LoadError("the disk is full")

    monkeypatch.setattr(pull, "pull", fail)
    assert cli("pull", "tiny").err == "unspool: error: the disk is full\n"


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (9_960_000, "10 MB"),
        (98_362_432, "98 MB"),
        (1_500_000_000, "1.5 GB"),
    ],
)
def test_sizes(size: int, text: str) -> None:
    assert format_size(size) == text
