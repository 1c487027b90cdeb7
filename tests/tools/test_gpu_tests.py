"""The runner of the GPU tests: every test runs once, and nothing that went wrong goes unseen."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FILE = Path(__file__).resolve().parents[2] / "tools" / "gpu_tests.py"
LONG = "import time\ndef test_wrong(): assert 1 == 2\ndef test_long(): time.sleep(60)\n"


@pytest.fixture(scope="module")
def runner() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_tests", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks its module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def _as_if_there_were_a_gpu(monkeypatch: pytest.MonkeyPatch, runner: ModuleType, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # logs go there
    monkeypatch.setattr(runner, "has_gpu", lambda: True)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they take a second, and nothing here needs them
    monkeypatch.delenv("PYTEST_PLUGINS", raising=False)


def test_every_test_is_in_one_share(runner: ModuleType) -> None:
    shares = [runner.keep_share(range(23), f"{place}/5") for place in range(5)]
    assert sorted(item for share in shares for item in share) == list(range(23))
    assert {len(share) for share in shares} == {4, 5}


def test_failures_and_crashes_are_told(runner: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "test_few.py").write_text(
        "import os\n"
        "def test_right(): pass\n"
        "def test_wrong(): assert 1 == 2\n"
        "def test_crash(): os._exit(7)\n"
        "def test_right_too(): pass\n"
    )
    assert runner.main(["--jobs", "3", str(tmp_path)]) == 1
    told = capsys.readouterr().out
    assert "\n2 passed, 1 failed, 1 error in " in told
    assert "assert 1 == 2" in told and "FAILED " in told and "test_few.py::test_wrong" in told
    assert "FAILED process 2 ended with status 7 in " in told and "test_few.py::test_crash\n" in told


def test_a_run_that_is_well_ends_with_0_and_one_without_tests_does_not(
    runner: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "test_few.py").write_text("def test_one(): pass\ndef test_two(): pass\n")
    assert runner.main(["--jobs", "2", str(tmp_path), "--", "-k", "test_two"]) == 0
    told = capsys.readouterr().out
    assert "process 1: nothing to run" in told and "\n1 passed in " in told
    assert runner.main(["--jobs", "1", str(tmp_path), "--", "-k", "nothing_like_it"]) == 1


def test_what_runs_too_long_is_stopped(runner: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "test_long.py").write_text(LONG)
    assert runner.main(["--jobs", "1", "--limit", "2", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert "the limit of 2 s stops the processes that still run: 1\n" in printed
    assert "1 error in " in printed and "FAILED process 0 was stopped" in printed


def test_progress_and_failures_are_printed_as_they_happen_and_a_signal_ends_with_a_summary(
    runner: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "test_long.py").write_text(LONG)
    monkeypatch.setattr(runner, "PROGRESS_SECONDS", 0.1)
    handler = signal.getsignal(signal.SIGTERM)
    printed = ""
    describe_progress = runner.describe_progress

    def describe_and_stop(*arguments: Any) -> str:
        nonlocal printed
        printed += capfd.readouterr().out
        progress = str(describe_progress(*arguments))
        if "failed: " in printed and "1 tests of 2" in progress:  # a failure is told before its test is over
            os.kill(os.getpid(), signal.SIGTERM)
        return progress

    monkeypatch.setattr(runner, "describe_progress", describe_and_stop)
    assert runner.main(["--jobs", "1", str(tmp_path)]) == 1
    assert "test_long.py::test_wrong\n" in printed and "assert 1 == 2" not in printed
    rest = capfd.readouterr().out
    assert " s: 1 tests of 2, 1 failed\n" in rest
    assert "SIGTERM stops the processes that still run: 1\n" in rest
    assert "assert 1 == 2" in rest and "\n1 failed, 1 error in " in rest
    assert "FAILED process 0 was stopped in " in rest and "test_long.py::test_long\n" in rest
    assert signal.getsignal(signal.SIGTERM) is handler


def test_a_file_that_can_not_be_imported_is_a_failure(
    runner: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "test_broken.py").write_text("import no_such_module\n")
    assert runner.main(["--jobs", "1", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert "\n1 error in " in printed and "No module named 'no_such_module'" in printed


def test_without_a_gpu_it_says_so(
    runner: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runner, "has_gpu", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert runner.main([]) == 0
    assert "no CUDA device" in capsys.readouterr().out


def test_what_takes_the_whole_card_runs_after_the_others(
    runner: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    marker = tmp_path / "others_are_done"
    (tmp_path / "conftest.py").write_text(
        "def pytest_configure(config): config.addinivalue_line('markers', 'whole_card: alone')\n"
    )
    (tmp_path / "test_cards.py").write_text(
        "import pathlib, time, pytest\n"
        f"DONE = pathlib.Path({str(marker)!r})\n"
        "@pytest.mark.whole_card\n"
        "def test_whole(): assert DONE.exists()\n"
        "def test_other():\n"
        "    assert not DONE.exists()\n"
        "    time.sleep(0.2)\n"
        "    DONE.touch()\n"
    )
    assert runner.main([str(tmp_path / "test_cards.py"), "--jobs", "1"]) == 0
    assert "2 passed" in capfd.readouterr().out
