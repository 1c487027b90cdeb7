"""`unspool batch`: a file in, a file out, also after `kill -9`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

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
