"""`unspool compress`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from unspool import LanguageModel, compress_prompt

TEXT = "the old pier and the new bridge of the town were built by one man and his dog"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "notes.txt"
    path.write_text(TEXT)
    return path


def test_the_prompt_is_printed_or_written(
    cli: Callable[..., Any], tiny: str, lm: LanguageModel, file: Path, tmp_path: Path
) -> None:
    made = compress_prompt(lm, TEXT, question="who", rate=0.4, window=8)
    given = (str(file), "--rate", "0.4", "--question", "who", "--window", "8", "-m", tiny)
    ended = cli("compress", *given)
    assert (ended.code, ended.out) == (0, made.text + "\n")
    assert f"{made.origin_tokens} tokens → {made.compressed_tokens}" in ended.err
    told = json.loads(cli("compress", *given, "--json").out)
    assert told["compressed_prompt"] == made.text
    assert "".join(token["text"] for token in told["tokens"]) == TEXT
    assert cli("compress", *given, "--output", str(tmp_path / "short.txt")).out == ""
    assert (tmp_path / "short.txt").read_text() == made.text


def test_a_view_shows_what_goes(cli: Callable[..., Any], tiny: str, file: Path) -> None:
    shown = cli("compress", "-", "--rate", "0.5", "--view", "-m", tiny, stdin=TEXT.encode()).out
    assert shown.replace("[-", "").replace("-]", "").strip() == TEXT
    assert shown.count("[-") == shown.count("-]") > 0


def test_what_can_not_be_is_refused(cli: Callable[..., Any], tiny: str, file: Path) -> None:
    for words in (
        (),
        ("-", "-"),
        (str(file), "--rate", "0"),
        (str(file), "--view", "--json"),
        (str(file.parent / "none.txt"),),
        (str(file), "--target-token", "999"),
    ):
        assert cli("compress", *words, "-m", tiny).code == 2
