"""A forked child answers, whatever its parent's threads were doing: no lock and no thread of theirs is waited for."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading

import pytest
import torch

from tests.cli.conftest import TINY, build_tokenizer
from tests.source import SOURCE
from unspool.errors import UnsupportedError
from unspool.forks import after_fork, make_lock
from unspool.kernels.presence import refuse_forked

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

# Threads that generate, draw, keep to grammars and have an engine work; children that do the same.
SCRIPT = """
import faulthandler, multiprocessing, os, sys, threading, time
import unspool

lm = unspool.load(sys.argv[1], **({"threads": int(sys.argv[2])} if sys.argv[2] != "0" else {}))
WAYS = [
    {},
    {"do_sample": True, "seed": 3},
    {"num_beams": 2},
    {"watermarking_config": unspool.WatermarkingConfig()},
    {"regex": "[a-d ]{3,9}"},
]
PROMPTS = ["the cat", "a dog and a", "one two three", "hello " * 12]

def answer(number, **more):
    return lm.generate(PROMPTS[number % 4], max_new_tokens=8, **WAYS[number % len(WAYS)], **more).text

expected = [answer(number) for number in range(20)]
engine = unspool.Engine(lm)
old = engine.submit(PROMPTS[0], max_new_tokens=4)
old_text = old.result().text
open_ones = []

def work(first):
    number = first
    while True:
        answer(number)
        number += 1

def keep_busy():
    while True:
        open_ones.append(engine.submit(PROMPTS[1], max_new_tokens=60))
        open_ones[-1].result()

def compile_grammars():
    for number in range(10**6):
        lm.generate("x", max_new_tokens=1, regex=f"[a-d]{{1,{1 + number % 9}}}e?{number % 7}")

def refused(ask):
    try:
        ask()
    except unspool.EngineError as error:
        return "forked from" in str(error)
    return False

def child(number):
    faulthandler.dump_traceback_later(float(sys.argv[3]), exit=True)
    if answer(number) != expected[number]:
        return 2
    if old.result().text != old_text:
        return 3
    if not refused(lambda: engine.submit("a")):
        return 4
    last = open_ones[-1]
    if not last.is_done or not (refused(last.result) or last.error is None):
        return 5
    engine.close()
    if number % 4 == 0:
        with unspool.Engine(lm) as mine:
            if mine.submit(PROMPTS[0], max_new_tokens=8).result().text != expected[0]:
                return 6
    return 0

for target, more in ((work, (0,)), (work, (4,)), (keep_busy, ()), (compile_grammars, ())):
    threading.Thread(target=target, args=more, daemon=True).start()
while not open_ones:
    time.sleep(0.01)
pids = []
for number in range(16):
    time.sleep(0.02 + 0.017 * (number % 7))
    pid = os.fork()
    if pid == 0:
        try:
            code = child(number)
        except BaseException:
            faulthandler.dump_traceback()
            import traceback
            traceback.print_exc()
            code = 9
        os._exit(code)
    pids.append(pid)
ends = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
process = multiprocessing.get_context("fork").Process(target=lambda: sys.exit(child(1)))
process.start()
process.join()
print(ends, process.exitcode, flush=True)
os._exit(0 if not any(ends) and process.exitcode == 0 else 1)
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a model with 128 positions."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    shutil.copytree(TINY, folder)
    folder.chmod(0o755)
    build_tokenizer().save(str(folder / "tokenizer.json"))
    return str(folder)


@pytest.mark.parametrize("threads", [0, 1])
def test_children_of_a_process_that_generates_answer(tiny: str, threads: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT, tiny, str(threads), "200"], env=environment, capture_output=True, timeout=900
    )
    assert ended.returncode == 0, ended.stdout.decode() + ended.stderr.decode()[-6000:]


def in_child(check: object) -> bool:
    """Whether a check is true in a forked child."""
    pid = os.fork()
    if pid == 0:
        os._exit(0 if callable(check) and check() else 1)
    return os.waitpid(pid, 0)[1] == 0


def test_a_lock_that_is_held_is_free_in_a_child_and_can_be_left() -> None:
    class Owner:
        def __init__(self) -> None:
            self.lock = make_lock(self, "lock")

    owner, taken, leave = Owner(), threading.Event(), threading.Event()

    def hold() -> None:
        with owner.lock:
            taken.set()
            leave.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    taken.wait()
    assert in_child(lambda: owner.lock.acquire(timeout=5))
    leave.set()
    thread.join()
    with owner.lock:
        assert in_child(lambda: owner.lock.acquire(timeout=5))
    assert owner.lock.acquire(timeout=5)


def test_what_is_renewed_is_not_kept_alive() -> None:
    class Owner:
        pass

    seen: list[str] = []
    owner, gone = Owner(), Owner()
    after_fork(owner, lambda _: seen.append("owner"))
    after_fork(gone, lambda _: seen.append("gone"))
    del gone
    assert in_child(lambda: seen == ["owner"]) and seen == []


# Those of a server: its loop does not live in a forked child.
_OWN = {"forks.py", "server/transcriptions.py", "server/turns.py"}


def test_every_lock_is_renewed() -> None:
    bare = re.compile(r"=\s*(?:threading\.)?R?Lock\(\)|= (?:threading\.)?Condition\(|setdefault\(.*Lock\(\)")
    found: list[str] = []
    for path in SOURCE.rglob("*.py"):
        text = path.read_text()
        name = path.relative_to(SOURCE).as_posix()
        if bare.search(text) and "after_fork" not in text and name not in _OWN:
            found.append(name)
    # The first two are renewed by their owners, the other is of CUDA, which no forked child has.
    assert set(found) <= {"engine/inbox.py", "engine/mailbox.py", "kernels/gpu/direct_driver.py"}, found


def test_a_gpu_is_refused_in_a_forked_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA tells who was forked from whom; that it says so is tested on a GPU (tests/gpu/test_forks.py)."""
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    refuse_forked(torch.device("cpu"))
    with pytest.raises(UnsupportedError, match="spawn"):
        refuse_forked(torch.device("cuda", 0))
