"""`unspool transcribe` on a tiny model: what it prints, what it writes, what it refuses."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tests.speech.models import save_speech_model
from tests.speech.test_features import draw_sound
from tests.speech.test_sound import write_wav

from unspool.cli.main import main

SURE = [
    "--language",
    "en",
    "--temperature",
    "0",
    "--logprob-threshold",
    "none",
    "--compression-ratio-threshold",
    "none",
]
SURE += ["--no-speech-threshold", "none"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("speech")
    save_speech_model(folder)
    for name, seconds in (("one", 1.3), ("two", 0.5)):
        (folder / f"{name}.wav").write_bytes(write_wav(draw_sound(seconds)[:, None], 16_000))
    return folder


def run(folder: Path, *words: str) -> int:
    return main(["transcribe", "-m", str(folder), *words])


def test_text_is_printed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, str(folder / "one.wav"), *SURE) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines and all(word.startswith("w") for line in lines for word in line.split())


@pytest.mark.parametrize("words", [["--format", "srt"], ["--format", "json"]])
def test_the_speed_is_told(folder: Path, capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert run(folder, str(folder / "one.wav"), "--stats", *words, *SURE) == 0
    assert "1.3 s of sound in" in capsys.readouterr().err


def test_one_file_for_each_sound(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(folder / "one.wav"), str(folder / "two.wav")]
    assert run(folder, *files, "-o", str(tmp_path / "out"), "--format", "json", "--word-timestamps", *SURE) == 0
    for name, seconds in (("one", 1.3), ("two", 0.5)):
        told = json.loads((tmp_path / "out" / f"{name}.json").read_text())
        assert told["duration"] == pytest.approx(seconds, abs=1e-3) and "words" in told["segments"][0]
    assert capsys.readouterr().out.count("out") == 2
    assert run(folder, *files, "-o", str(tmp_path / "out"), "--format", "json", *SURE) == 2
    assert "--force" in capsys.readouterr().err


def test_a_grammar(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["transcribe", "-m", str(folder), *SURE, "--choice", " w5 w17"]
    assert main([*words, str(folder / "two.wav")]) == 0
    assert capsys.readouterr().out == "w5 w17\n"
    for more in (["--word-timestamps", "--format", "json", str(folder / "two.wav")], [str(folder / "one.wav")]):
        assert main([*words, *more]) == 2
        assert "`choice` describes the whole text, and timestamps are written" in capsys.readouterr().err


def test_standard_input(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    samples = np.round(draw_sound(1.3) * 32_000).astype("<i2").tobytes()
    for content, more in ((write_wav(draw_sound(1.3)[:, None], 16_000), []), (samples, ["--raw-rate", "16000"])):
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(content)))
        assert run(folder, "-", "--format", "srt", *more, *SURE) == 0
        assert capsys.readouterr().out.startswith("1\n00:00:")


def test_a_draft_model_changes_no_text(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(folder / "one.wav"), str(folder / "two.wav")]
    assert run(folder, *files, *SURE) == 0
    plain = capsys.readouterr().out
    assert run(folder, *files, *SURE, "--assistant-model", str(folder), "--num-assistant-tokens", "4") == 0
    assert capsys.readouterr().out == plain != ""


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["one.wav", "--assistant-model", "no/such model"], "no/such model"),
        (["one.wav", "--num-assistant-tokens", "3"], "steers a draft model"),
        ([], "name a sound file"),
        (["-", "-"], "read once"),
        (["no.wav"], "there is no file no.wav"),
        (["one.wav", "--format", "doc"], "not one of txt, srt, vtt, json"),
        (["one.wav", "--word-timestamps"], "--format vtt or json"),
        (["one.wav", "--raw-rate", "8000"], "for samples from standard input"),
        (["one.wav", "--temperature", "warm"], "is no number"),
        (["one.wav", "--language", "elvish"], "is not one of the 3"),
        (["one.wav", "one.wav", "-o", "out"], "two sounds would be written"),
        (["one.wav", "two.wav", "--format", "srt"], "add -o DIR"),
    ],
)
def test_what_is_refused(
    folder: Path, words: list[str], told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    assert run(folder, *words) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("size", ["1", "8"])
def test_a_sound_that_can_not_be_read_costs_no_other(
    folder: Path, size: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """That a file was cut off is found when it is read, in the midst of others."""
    (tmp_path / "bad.wav").write_bytes(write_wav(draw_sound(0.5)[:, None], 16_000)[:-1000])
    files = [str(folder / "one.wav"), str(tmp_path / "bad.wav"), str(folder / "two.wav")]
    written = []
    for names in (files, files[::2]):
        out = tmp_path / str(len(names))
        code = run(folder, *names, "-o", str(out), "--batch-size", size, *SURE)
        assert code == (2 if len(names) == 3 else 0)
        assert ("bad.wav ends 1000 bytes before" in capsys.readouterr().err) == (len(names) == 3)
        written.append({path.name: path.read_text() for path in out.iterdir()})
    assert written[0] == written[1] and sorted(written[0]) == ["one.txt", "two.txt"]


@pytest.mark.parametrize("command", [["run", "hello"], ["chat"], ["explain", "hello"]])
def test_commands_for_text_point_here(folder: Path, command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "-m", str(folder)]) == 2
    assert f"unspool transcribe -m {folder} FILE" in capsys.readouterr().err
