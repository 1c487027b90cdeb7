"""The files of a batch: whole lines after any end, and jobs that are not mixed up."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unspool.batch.output import Done, JobOutput
from unspool.errors import InputError, ResourceError, SettingError

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


def test_two_runs_do_not_write_one_output(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    first = JobOutput(path)
    first.open(JOB)
    (tmp_path / "link.jsonl").symlink_to(path)
    for name in ("out.jsonl", "link.jsonl"):
        for restarts in (False, True):
            with pytest.raises(ResourceError, match=f"written by process {os.getpid()} on"):
                JobOutput(tmp_path / name).open(JOB, restarts=restarts)
    assert path.with_name("out.jsonl.job").exists()  # --restart deleted nothing
    first.close()
    again = JobOutput(path)
    assert again.open(JOB)
    again.close()
    assert not [one for one in tmp_path.iterdir() if "lock" in one.name]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_lock_ends_with_its_process_whoever_it_forked(tmp_path: Path) -> None:
    script = """if True:
        import os, sys, time, pathlib
        from unspool.batch.output import JobOutput
        output = JobOutput(sys.argv[1])
        output.open({"seed": 0})
        if os.fork() == 0:  # an orphan, as workers of a killed process are, which has its turn only after some time
            print("held", flush=True)
        time.sleep(60)
    """
    path = tmp_path / "out.jsonl"
    holder = subprocess.Popen([sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE, start_new_session=True)
    assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
    try:
        with pytest.raises(ResourceError, match=f"process {holder.pid} on"):
            JobOutput(path).open({"seed": 0})
        holder.kill()
        holder.wait()
        assert JobOutput(path).open({"seed": 0})
    finally:
        os.killpg(holder.pid, signal.SIGKILL)
        holder.stdout.close()
        holder.wait()


@pytest.mark.parametrize("number", [1 << 39, 10, 0, -1, 1.0, True, "1"])
def test_lines_of_rows_that_the_input_lacks_are_refused(tmp_path: Path, number: object) -> None:
    path = tmp_path / "out.jsonl"
    JobOutput(path).open(JOB, last=9)
    path.write_text(json.dumps({"line": number}) + '\n{"line": 2}\n')
    with pytest.raises(InputError, match="did not write"):
        JobOutput(path).open(JOB, last=9)


def test_all_that_differs_is_told(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    JobOutput(path).open({"input": "a" * 64, "settings": {"top_k": "5", "top_p": "0.5"}, "dtype": "float32"})
    now = {"input": "b" * 64, "settings": {"top_k": "6", "min_p": "0.5"}, "dtype": "float32", "weights": "x"}
    with pytest.raises(SettingError) as caught:
        JobOutput(path).open(now)
    told = str(caught.value)
    assert "an input of another content" in told and "settings: top_k '5', and now it is '6'" in told
    assert "settings: top_p '0.5', and now it is not given" in told and "settings: min_p nothing said" in told
    assert "weights nothing said" in told and "dtype" not in told and "--restart" in told
