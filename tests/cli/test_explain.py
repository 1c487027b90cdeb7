"""`unspool explain`."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import unspool
from unspool.cli import explain
from unspool.decoding.beams.trace import BeamTrace
from unspool.explain.wording import measure, show_text, write_number

SMALL = ("--num-beams", "3", "--max-new-tokens", "5")


def test_the_tree_is_the_library_s(
    cli: Callable[..., Any], tiny: str, lm: unspool.LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "72")
    ended = cli("explain", "Hello there", "-m", tiny, *SMALL)
    expected = lm.generate(
        "Hello there", num_beams=3, num_return_sequences=3, max_new_tokens=5, return_beam_trace=True,
        skip_special_tokens=False,
    )  # fmt: skip
    assert ended.code == 0 and max(map(measure, ended.out.splitlines())) <= 72  # the fixture saw that it has no colours
    assert ended.out.startswith("Hello there")
    listed = [line for line in ended.out.splitlines() if re.match(r" +\d ", line)]
    assert len(listed) == 3 == len(expected.texts)
    for line, text, one in zip(listed, expected.texts, expected.beam_trace.returned, strict=True):
        assert line.split()[1:3] == [write_number(one.score), one.reason] and line.endswith(show_text(text).strip())
    assert ended.err == "a picture to keep: add --html beams.html, --svg beams.svg or --json beams.json\n"


def test_the_short_way_carries_the_trace(lm: unspool.LanguageModel) -> None:
    generation = lm.generate(["Hi", "Hello"], num_beams=2, max_new_tokens=4, return_beam_trace=True)
    trace = generation.beam_trace
    assert generation.output is None and trace.num_prompts == 2
    assert [[one.token for one in trace.follow(end)] for end in trace.returned] == generation.token_ids
    assert lm.generate("Hi", num_beams=2, max_new_tokens=4).beam_trace is None
    assert lm.generate("Hi", max_new_tokens=4).beam_trace is None


def test_defaults(cli: Callable[..., Any], tiny: str, tmp_path: Path) -> None:
    path = tmp_path / "beams.json"
    assert cli("explain", "Hi", "-m", tiny, "--json", str(path)).code == 0
    report = json.loads(path.read_text())
    assert report["settings"] == {"num_beams": 4, "max_new_tokens": 12, "num_return_sequences": 4}
    assert report["trace"]["num_beams"] == 4 and max(step["step"] for step in report["trace"]["steps"]) <= 12
    shown = cli("explain", "--help").out
    assert re.search(r"--num-beams N[^\[]*\[4\]", shown) and re.search(r"--max-new-tokens N[^\[]*\[12\]", shown)


def test_files(cli: Callable[..., Any], tiny: str, lm: unspool.LanguageModel, tmp_path: Path) -> None:
    paths = {kind: tmp_path / f"beams.{kind}" for kind in explain.FILES}
    words = [word for kind, path in paths.items() for word in (f"--{kind}", str(path))]
    ended = cli("explain", "Hi", "-m", tiny, *SMALL, *words)
    assert ended.code == 0 and ended.err == "".join(f"wrote {path}\n" for path in paths.values())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["beams.html", "beams.json", "beams.svg"]
    assert ET.parse(paths["svg"]).getroot().tag.endswith("svg")
    assert paths["html"].read_text().startswith("<!DOCTYPE html>") and "</html>" in paths["html"].read_text()
    report = json.loads(paths["json"].read_text())
    trace = BeamTrace.from_dict(report["trace"])
    expected = lm.generate("Hi", num_beams=3, num_return_sequences=3, max_new_tokens=5, return_beam_trace=True)
    assert trace == expected.beam_trace and report["texts"] == expected.texts
    assert lm.tokenizer is not None
    for step in trace.steps:
        assert all(report["tokens"][str(one.token)] == lm.tokenizer.decode([one.token]) for one in step.candidates)
    assert report["prompt"] == "Hi" and [report["prompt_token_ids"]] == expected.prompt_token_ids


def test_a_file_that_exists_is_kept(cli: Callable[..., Any], tiny: str, tmp_path: Path) -> None:
    path = tmp_path / "beams.svg"
    path.write_text("mine")
    ended = cli("explain", "Hi", "-m", "no/such/model", *SMALL, "--svg", str(path))  # before a model is looked for
    assert ended.code == 2 and ended.out == "" and "exists already; --force writes over it" in ended.err
    assert path.read_text() == "mine"
    assert cli("explain", "Hi", "-m", tiny, *SMALL, "--svg", str(path), "--force").code == 0
    assert path.read_text().startswith("<svg")


def test_a_write_that_fails_leaves_the_old_file(
    cli: Callable[..., Any], tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "beams.svg"
    path.write_text("mine")

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    ended = cli("explain", "Hi", "-m", tiny, *SMALL, "--svg", str(path), "--force")
    assert ended.code == 2 and "can't be written: No space left on device" in ended.err
    assert path.read_text() == "mine" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--num-beams", "1"), "at least two beams"),
        (("--svg", "{folder}"), "is a folder; name a file in it"),
        (("--html", "{folder}/none/beams.html"), "there is no folder"),
        (("--html", "{folder}/a", "--svg", "{folder}/a"), "name the same file"),
        (("--system", "Be brief."), "add --chat"),
        (("--logprobs", "2"), "use unspool run --json"),
        (("--output-scores",), "returns tensors"),
        (("--no-return-beam-trace",), "`return_beam_trace` is what this command draws"),
        (("--num-return-sequences", "9"), "num_return_sequences"),
        (("--num-beam-groups", "3", "--diversity-penalty", "1.0"), "num_beam_groups"),
    ],
)
def test_what_is_refused(cli: Callable[..., Any], tiny: str, tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    ended = cli("explain", "Hi", "-m", tiny, *(word.format(folder=tmp_path) for word in words))
    assert ended.code == 2 and ended.out == "" and said in ended.err and list(tmp_path.iterdir()) == []


def test_other_commands_say_where_the_trace_is_drawn(cli: Callable[..., Any], tiny: str) -> None:
    ended = cli("run", "Hi", "-m", tiny, "--num-beams", "2", "--return-beam-trace")
    assert ended.code == 2 and "unspool explain" in ended.err


def test_every_kind_of_search_and_a_chat(cli: Callable[..., Any], tiny: str) -> None:
    for words in (
        ("--do-sample", "--seed", "1"),
        ("--num-beam-groups", "2", "--diversity-penalty", "1.0"),
        ("--force-words-ids", "[[5, 6]]"),
        ("--chat", "--system", "Be brief."),
    ):
        ended = cli("explain", "Hi", "-m", tiny, *words)
        assert ended.code == 0 and ended.out.count("#") >= 4 and "  4  " in ended.out
    assert cli("explain", "-m", tiny, *SMALL, stdin=b"Hi\n").out == cli("explain", "Hi", "-m", tiny, *SMALL).out


def test_colours_on_a_terminal(tiny: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unspool.cli.console.can_colour", lambda _stream: True)
    from unspool.cli.main import main

    assert main(["explain", "Hi", "-m", tiny, *SMALL]) == 0
    out = capsys.readouterr().out
    assert "\x1b[1;32m● " in out and "\x1b[m" not in out
