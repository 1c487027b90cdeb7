"""`unspool run` with a translation model: languages by their codes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.text.test_sentencepiece import MARIAN, TOKENS

GOLDEN = Path(__file__).parents[1] / "conformance" / "goldens" / "models" / "marian"


@pytest.fixture(scope="module")
def translator(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny Marian model in its usual layout."""
    folder = tmp_path_factory.mktemp("models") / "marian"
    shutil.copytree(GOLDEN, folder)
    folder.chmod(0o755)
    (folder / "source.spm").write_bytes(MARIAN)
    (folder / "target.spm").write_bytes(MARIAN)
    tokens = [*TOKENS, *(f"▁w{index}" for index in range(160 - len(TOKENS)))]
    (folder / "vocab.json").write_text(json.dumps({token: index for index, token in enumerate(tokens)}))
    return str(folder)


def test_a_target_language_changes_the_source(cli: Callable[..., Any], translator: str) -> None:
    few = ("--model", translator, "--max-new-tokens", "6", "--num-beams", "2", "--json")
    told = cli("run", "hello world", *few, "--target-lang", "deu")
    assert told.code == 0 and told.err == ""
    marked, plain = (json.loads(cli("run", text, *few).out) for text in (">>deu<< hello world", "hello world"))
    report = json.loads(told.out)
    assert report["token_ids"] == marked["token_ids"]
    assert report["stats"]["prompt_tokens"] == marked["stats"]["prompt_tokens"] == plain["stats"]["prompt_tokens"] + 1


def test_languages_that_a_model_has_not_are_refused(cli: Callable[..., Any], translator: str, tiny: str) -> None:
    ended = cli("run", "hello", "--model", translator, "--target-lang", "spa")
    assert ended.code != 0 and "it knows deu, fra" in ended.err
    ended = cli("run", "hello", "--model", tiny, "--target-lang", "deu")
    assert ended.code != 0 and "no language codes" in ended.err
    ended = cli("run", "hello", "--model", tiny, "--chat", "--source-lang", "deu")
    assert ended.code != 0 and "no chat" in ended.err


@pytest.mark.parametrize("command", [["run", "--chat", "hello"], ["chat"]])
def test_a_model_without_a_chat_template_is_pointed_to_run(
    cli: Callable[..., Any], translator: str, command: list[str]
) -> None:
    told = cli(*command, "--model", translator)
    assert told.code == 2 and f"unspool run -m {translator}" in told.err
