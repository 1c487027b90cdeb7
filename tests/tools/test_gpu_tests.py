"""The runner of the GPU tests: every test runs once, and nothing that went wrong goes unseen."""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import pytest

FILE = Path(__file__).resolve().parents[2] / "tools" / "gpu_tests.py"


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
    assert "FAILED process 2 ended with status 7" in told


def test_a_run_that_is_well_ends_with_0_and_one_without_tests_does_not(
    runner: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "test_few.py").write_text("def test_one(): pass\ndef test_two(): pass\n")
    assert runner.main(["--jobs", "2", str(tmp_path), "--", "-k", "test_two"]) == 0
    told = capsys.readouterr().out
    assert "process 1: nothing to run" in told and "\n1 passed in " in told
    assert runner.main(["--jobs", "1", str(tmp_path), "--", "-k", "nothing_like_it"]) == 1


def test_what_runs_too_long_is_stopped(runner: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "test_long.py").write_text("import time\ndef test_long(): time.sleep(60)\n")
    assert runner.main(["--jobs", "1", "--limit", "2", str(tmp_path)]) == 1
    assert "ran past 2 s and are stopped: 1\n" in capsys.readouterr().out


def test_without_a_gpu_it_says_so(
    runner: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runner, "has_gpu", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert runner.main([]) == 0
    assert "no CUDA device" in capsys.readouterr().out
