"""A child that was forked from a process with a model on a GPU is told so, and waits for nothing."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from tests.conformance.cases import GOLDENS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SCRIPT = """
import os, sys
import unspool

lm = unspool.load(sys.argv[1], device="cuda")
engine = unspool.Engine(lm, memory=1 << 24)
handle = engine.submit([5, 6, 7], max_new_tokens=100)

def refused(ask):
    try:
        ask()
    except (unspool.UnsupportedError, unspool.EngineError):
        return True
    return False

pid = os.fork()
if pid == 0:
    ways = (
        lambda: lm.generate([5, 6, 7], max_new_tokens=4),
        lambda: unspool.Engine(lm),
        lambda: engine.submit([5]),
        lambda: unspool.load(sys.argv[1], device="cuda"),
    )
    code = sum(1 << place for place, ask in enumerate(ways) if not refused(ask))
    engine.close()
    os._exit(code)
end = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
assert len(handle.result().token_ids) > 0
print("child", end)
engine.close()
sys.exit(end)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_is_refused() -> None:
    command = [sys.executable, "-c", SCRIPT, str(GOLDENS / "models" / "llama")]
    ended = subprocess.run(command, capture_output=True, timeout=300)
    assert ended.returncode == 0, ended.stdout.decode() + ended.stderr.decode()[-3000:]
