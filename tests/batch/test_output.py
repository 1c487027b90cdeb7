"""The files of a batch: whole lines after any end, and jobs that are not mixed up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unspool.batch.output import Done, JobOutput
from unspool.errors import InputError, SettingError

JOB = {"input": "x", "seed": 0}


@given(st.sets(st.integers(1, 5000)))
@settings(max_examples=40)
def test_done_rows_are_a_set(numbers: set[int]) -> None:
    done = Done()
    for number in numbers:
        done.add(number)
        done.add(number)
    assert done.count == len(numbers)
    assert {number for number in range(5002) if number in done} == numbers


def test_a_line_that_is_not_whole_is_cut_off(tmp_path: Path) -> None:
    output = JobOutput(tmp_path / "out.jsonl")
    assert not output.open(JOB)
    for number in (3, 1, 7):
        output.answers.write({"line": number, "text": "é" * number})
    output.errors.write({"line": 2, "error": {"message": "no"}})
    output.close()
    whole = output.path.read_bytes()
    for cut in range(1, len(whole)):
        output.path.write_bytes(whole[:cut])
        again = JobOutput(output.path)
        assert again.open(JOB)
        kept = again.path.read_bytes()
        assert whole.startswith(kept) and (not kept or kept.endswith(b"\n"))
        lines = [json.loads(line)["line"] for line in kept.splitlines()]
        assert again.done.count == len(lines) + 1 and all(number in again.done for number in [*lines, 2])
    assert lines == [3, 1]


def test_another_job_is_not_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    JobOutput(path).open(JOB)
    with pytest.raises(SettingError, match=r"begun with seed 0, and now it is 1.*--restart"):
        JobOutput(path).open({**JOB, "seed": 1})
    assert not JobOutput(path).open({**JOB, "seed": 1}, restarts=True)


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text("mine\n")
    with pytest.raises(SettingError, match="no batch wrote it"):
        JobOutput(path).open(JOB)
    path.unlink()
    JobOutput(path).open(JOB)
    path.write_text('{"line": 1}\nmine\n{"line": 2}\n')
    with pytest.raises(InputError, match="did not write"):
        JobOutput(path).open(JOB)
    with pytest.raises(SettingError, match="its folder is not there"):
        JobOutput(tmp_path / "no" / "out.jsonl")


def test_a_full_disk_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = JobOutput(tmp_path / "out.jsonl")
    output.open(JOB)
    output.answers.write({"line": 1})

    class Full:
        def __init__(self, file: object) -> None:
            self.file, self.calls = file, 0

        def write(self, data: bytes) -> int:
            self.calls += 1
            if self.calls > 1:
                raise OSError(28, "No space left on device")
            return self.file.write(data[:3])

        def __getattr__(self, name: str) -> object:
            return getattr(self.file, name)

    output.answers._file = Full(output.answers._file)
    with pytest.raises(InputError, match="No space left on device"):
        output.answers.write({"line": 2})
    output.close()
    assert output.path.read_text() == '{"line": 1}\n'
