"""`unspool batch`: a file in, a file out, also after `kill -9`."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from unspool.batch.job import Job
from unspool.batch.output import JobOutput
from unspool.batch.sources import open_source
from unspool.engine import Engine
from unspool.errors import InputError

NUM_ROWS = 60
OPTIONS = ("--max-new-tokens", "24", "--max-rows", "4", "--do-sample", "--seed", "5")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    rows = [{"prompt": "abc " * (1 + number % 7), "id": number} for number in range(1, NUM_ROWS + 1)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_file_is_answered(cli: Callable[..., Any], tiny: str, source: Path, tmp_path: Path) -> None:
    with source.open("a") as file:
        file.write("not json\n")
    out = tmp_path / "out.jsonl"
    ended = cli("batch", str(source), "-o", str(out), "-m", tiny, *OPTIONS)
    assert ended.code == 3 and ended.out == ""
    assert f"{NUM_ROWS + 1} lines" in ended.err and "1 failed" in ended.err and str(out) in ended.err
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert sorted(row["line"] for row in rows) == list(range(1, NUM_ROWS + 1))
    assert json.loads((tmp_path / "out.jsonl.errors").read_text())["line"] == NUM_ROWS + 1
    again = cli("batch", str(source), "-o", str(out), "-m", tiny, *OPTIONS)
    assert "61 of 61 lines were done before" in again.err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--shard", "0/4"), "I from 1 to N"),
        (("--shard", "x"), "I/N"),
        (("--limit", "0"), "at least 1"),
        (("--prompt-column", "q"), "columns are named"),
        (("--memory", "much"), "such as"),
    ],
)
def test_bad_options(cli: Callable[..., Any], tiny: str, source: Path, tmp_path: Path, words: Any, told: str) -> None:
    ended = cli("batch", str(source), "-o", str(tmp_path / "o.jsonl"), "-m", tiny, *words)
    assert ended.code == 2 and told in ended.err
    assert not (tmp_path / "o.jsonl").exists()


def test_a_killed_job_goes_on(cli: Callable[..., Any], tiny: str, source: Path, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    assert cli("batch", str(source), "-o", str(whole), "-m", tiny, *OPTIONS).code == 0
    command = [sys.executable, "-c", "from unspool.cli.main import main; main()", "batch", str(source)]
    for _ in range(2):
        held = parts.stat().st_size if parts.exists() else 0
        process = subprocess.Popen(
            [*command, "-o", str(parts), "-m", tiny, *OPTIONS], stderr=subprocess.DEVNULL, env={**os.environ}
        )
        until = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < until:
            if parts.exists() and parts.stat().st_size > held:
                break
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert parts.stat().st_size <= whole.stat().st_size
    assert cli("batch", str(source), "-o", str(parts), "-m", tiny, *OPTIONS).code == 0
    assert sorted(parts.read_text().splitlines()) == sorted(whole.read_text().splitlines())


def copy_model(tiny: str, place: Path) -> Path:
    shutil.copytree(tiny, place)
    return place


def change_weights(folder: Path) -> None:
    """One number of the file's last tensor, in place: its size, its name and its time stay."""
    path = folder / "model.safetensors"
    state = path.stat()
    with path.open("r+b") as file:
        file.seek(-2, os.SEEK_END)
        last = file.read(1)
        file.seek(-2, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))


def change_middle(path: Path) -> None:
    """A letter in the middle of a large file, whose size and time stay."""
    state = path.stat()
    with path.open("r+b") as file:
        file.seek(state.st_size // 2)
        place = file.read(400).index(b"abc") + state.st_size // 2
        file.seek(place)
        file.write(b"abd")
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))


def change_json(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**(json.loads(path.read_text()) if path.exists() else {}), **values}))


CHANGES: dict[str, tuple[Callable[[Path, Path], Any], tuple[str, ...], str]] = {
    "weights": (lambda folder, _: change_weights(folder), (), "model files of another content"),
    "template": (
        lambda folder, _: change_json(folder / "tokenizer_config.json", chat_template="{{ messages }}"),
        (),
        "model files",
    ),
    "defaults": (lambda folder, _: change_json(folder / "generation_config.json", top_k=3), (), "top_k"),
    "config": (lambda folder, _: change_json(folder / "config.json", rms_norm_eps=1e-3), (), "model files"),
    "input": (lambda _, source: change_middle(source), (), "an input of another content"),
    "dtype": (lambda *_: None, ("--dtype", "bfloat16"), "dtype 'auto (float32)', and now it is 'bfloat16'"),
    "quantize": (lambda *_: None, ("--quantize", "int8"), "quantize 'auto', and now it is 'int8'"),
    "top_p": (lambda *_: None, ("--top-p", "0.5"), "settings: top_p nothing said, and now it is '0.5'"),
    "any model": (lambda *_: None, ("--any-model",), "any_model False, and now it is True"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_resumed_job_has_the_model_and_the_input_that_it_was_begun_with(
    cli: Callable[..., Any], tiny: str, tmp_path: Path, change: str
) -> None:
    folder, out, source = copy_model(tiny, tmp_path / "model"), tmp_path / "out.jsonl", tmp_path / "in.jsonl"
    line = json.dumps({"prompt": "abc " * 10, "max_new_tokens": 2}) + "\n"
    filler = " " * 80_000 + "\n"  # lines that are no rows make it large
    source.write_text((line + filler * 20) * 2)
    words = ("batch", str(source), "-o", str(out), "-m", str(folder), *OPTIONS[2:])
    assert cli(*words, "--limit", "1").code == 0
    alter, more, told = CHANGES[change]
    alter(folder, source)
    before = out.read_bytes()
    ended = cli(*words, *more)
    assert ended.code == 2 and told in ended.err and "--restart" in ended.err, ended.err
    assert out.read_bytes() == before
    assert cli(*words, *more, "--restart").code == 0 and len(out.read_text().splitlines()) == 2


def test_what_answers_do_not_depend_on_may_change(cli: Callable[..., Any], tiny: str, tmp_path: Path) -> None:
    folder, out, source = copy_model(tiny, tmp_path / "model"), tmp_path / "out.jsonl", tmp_path / "in.jsonl"
    source.write_text('{"prompt": "abc", "max_new_tokens": 2}\n' * 3)
    words = ("batch", str(source), "-o", str(out), "-m", str(folder))
    assert cli(*words, "--limit", "1").code == 0
    (folder / "README.md").write_text("of the model")
    for path in folder.iterdir():
        os.utime(path)
    assert cli(*words, "--threads", "1", "--max-rows", "2", "--memory", "64M", "--offline").code == 0
    assert len(out.read_text().splitlines()) == 3


def test_an_input_that_changes_while_it_is_read_ends_the_job(lm: Any, tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt": "abc", "max_new_tokens": 2}\n' * 60)
    with Engine(lm, max_rows=2) as engine:
        job = Job(lm, engine, open_source(path), JobOutput(tmp_path / "out.jsonl"), name="tiny")
        with pytest.raises(InputError, match=r"in.jsonl was changed while it was read"):
            job.run(lambda _: path.write_text('{"prompt": "abd", "max_new_tokens": 3}\n' * 60))


def test_a_second_run_on_an_output_is_refused(tiny: str, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    command = [sys.executable, "-c", "from unspool.cli.main import main; main()", "batch", str(source)]
    command += ["-o", str(out), "-m", tiny, *OPTIONS]
    runs = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    ends = [(run.communicate(timeout=300)[1], run.returncode) for run in runs]
    lines = [json.loads(line)["line"] for line in out.read_text().splitlines()]
    assert sorted(lines) == list(range(1, NUM_ROWS + 1))
    assert any(code == 0 for _, code in ends)
    for told, code in ends:
        assert code == 0 or re.search(r"is being written by process \d+ on ", told), told
