"""Loading, and the first token, start none of OpenMP's threads: on a busy machine they spin for the cores they lack."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.loading.checkpoints import write_checkpoint
from tests.loading.test_super_blocks import METADATA, make_tensors

from unspool.kernels.cpu.library import find_library
from unspool.kernels.torch_threads import _find_setter

needs_both = pytest.mark.skipif(
    find_library() is None or _find_setter() is None or not Path("/proc/self/task").is_dir(),
    reason="counts threads on Linux, of torch's OpenMP beside the CPU library",
)
# A thread that was started once is there to the end of the process, so that counting afterwards finds it.
PROGRAM = """
import json, os, sys, time
import torch
import unspool
def count():
    for _ in range(40):  # the thread that read the tokenizer takes a moment to end
        if len(os.listdir("/proc/self/task")) == before:
            break
        time.sleep(0.05)
    return len(os.listdir("/proc/self/task")) - before
before = len(os.listdir("/proc/self/task"))
for path, settings, prompt in json.loads(sys.argv[1]):
    lm = unspool.load(path, **settings)
    loaded = count()
    if prompt:
        unspool.generate(lm.model, torch.tensor([[3, 4, 5]]), max_new_tokens=3, do_sample=False)
    print(loaded, count())
"""


@needs_both
def test_no_openmp_thread_is_started(write_gguf: Callable[..., Path], tmp_path: Path) -> None:
    cases: list[tuple[str, dict[str, Any], bool]] = []
    for mix in ("Q4_K_M", "Q5_1"):
        path = write_gguf(METADATA, make_tensors(mix)).rename(tmp_path / f"{mix}.gguf")
        cases += [(str(path), {}, True), (str(path), {"quantize": "int8"}, True)]
        cases += [(str(path), {"quantize": None}, mix == "Q4_K_M"), (str(path), {"dtype": "bfloat16"}, False)]
    for name, dtype in (("llama", torch.bfloat16), ("gpt2", torch.float32), ("t5", torch.float16)):
        path = write_checkpoint(tmp_path / name, name, dtype)
        cases += [(str(path), {"quantize": kind}, True) for kind in (None, "int8", "int4")]
    given = {"OMP_NUM_THREADS": "3", "UNSPOOL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(cases)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **given},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    started = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert dict(zip([str(case) for case in cases], started, strict=True)) == {str(case): (0, 0) for case in cases}


# One core for two threads: one of them is always without, as beside other programs on a busy machine.
CROWDED = """
import os, sys, time
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import torch
import unspool
lm = unspool.load(sys.argv[1])
for ids in ([[3, 4, 5]], [[7, 8]]):
    before = time.process_time()
    out = unspool.generate(lm.model, torch.tensor(ids), max_new_tokens=6, do_sample=False)
    print(time.process_time() - before, *out[0].tolist())
"""


@pytest.mark.skipif(
    find_library() is None or not hasattr(os, "sched_setaffinity"), reason="the CPU library's threads, on Linux"
)
def test_threads_without_a_core_are_not_waited_for(tmp_path: Path) -> None:
    """By processor time: waiting at every meeting of a pass took half a second of it, for a hundredth of work."""
    path = write_checkpoint(tmp_path / "deep", "deep", torch.bfloat16)
    times, tokens = [], []
    for threads in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", CROWDED, str(path)],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "UNSPOOL_NUM_THREADS": threads, "OMP_NUM_THREADS": "1"},
            timeout=300,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        lines = [line.split() for line in done.stdout.splitlines()]
        times.append([float(first) for first, *_ in lines])
        tokens.append([rest for _, *rest in lines])
    assert tokens[0] == tokens[1]
    assert sum(times[1]) - sum(times[0]) < 0.25, times
