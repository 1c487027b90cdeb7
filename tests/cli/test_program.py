"""The program as it is started: pipes, signals and a terminal, with the default model where text matters."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from unspool.loading.catalogue import store_folder

PROGRAM = [sys.executable, "-m", "unspool"]
# A new session has no terminal until it opens one; ctrl-c is a signal only to those that a terminal belongs to.
TAKE_TERMINAL = "import os, sys; os.close(os.open(os.ttyname(0), os.O_RDWR)); os.execv(sys.argv[1], sys.argv[1:])"
PATIENCE = 60  # seconds, on a busy machine


def clean_environment(tmp_path: Path, **extra: str) -> dict[str, str]:
    """A home of its own, so that no history is touched, in which the models of the real one are found."""
    kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "UNSPOOL_DEBUG")}
    home = tmp_path / "home"
    if not home.exists():
        home.mkdir()
        (home / "models").symlink_to(store_folder() / "models")
    return {**kept, "TERM": "xterm", "UNSPOOL_HOME": str(home), **extra}


class Terminal:
    """The program with a terminal at all its streams."""

    def __init__(self, words: list[str], environment: dict[str, str]) -> None:
        self._master, slave = pty.openpty()
        termios.tcsetwinsize(slave, (40, 100))
        self.process = subprocess.Popen(
            [sys.executable, "-c", TAKE_TERMINAL, *PROGRAM, *words],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment,
            start_new_session=True,
        )
        os.close(slave)
        self.seen = ""

    def type(self, text: str) -> None:
        time.sleep(0.3)  # as a person would: a signal between the prompt and the wait for a line is noticed late
        os.write(self._master, text.encode())

    def read_until(self, pattern: str) -> str:
        """Wait for the pattern in what comes after the last one found."""
        start = time.monotonic()
        while (found := re.search(pattern, self.seen)) is None:
            remaining = PATIENCE - (time.monotonic() - start)
            ready, _, _ = select.select([self._master], [], [], max(0.0, remaining))
            assert ready, f"{pattern!r} did not come after {self.seen[-2000:]!r}"
            try:
                self.seen += os.read(self._master, 65536).decode(errors="replace")
            except OSError as error:  # the other side is closed
                raise AssertionError(f"{pattern!r} did not come before the end: {self.seen[-2000:]!r}") from error
        before = self.seen[: found.end()]
        self.seen = self.seen[found.end() :]
        return before

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(PATIENCE)
        os.close(self._master)


@pytest.fixture
def terminals() -> Iterator[list[Terminal]]:
    opened: list[Terminal] = []
    yield opened
    for terminal in opened:
        terminal.close()


def test_the_default_model_answers_in_json(default_model_file: Path, tmp_path: Path) -> None:
    ended = subprocess.run(
        [*PROGRAM, "run", "The capital of France is", "--max-new-tokens", "5", "--json"],
        capture_output=True,
        text=True,
        env=clean_environment(tmp_path),
        timeout=PATIENCE,
    )
    assert ended.returncode == 0 and ended.stderr == ""
    report = json.loads(ended.stdout)
    assert report["model"] == "smollm2-135m" and report["text"].startswith(" Paris")
    assert report["stats"]["new_tokens"] == 5 and report["finish_reasons"] == ["length"]


def test_a_reader_that_leaves_early_is_no_error(tiny: str, tmp_path: Path) -> None:
    # More text than a pipe holds, so that the writer notices.
    words = ["run", "Hello", "-m", tiny, "--do-sample", "--num-return-sequences", "200", "--seed", "1"]
    process = subprocess.Popen(
        [*PROGRAM, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=clean_environment(tmp_path)
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait(PATIENCE) == 141
    process.stderr.close()


def test_ctrl_c_ends_a_run(tiny: str, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*PROGRAM, "run", "-m", tiny],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=clean_environment(tmp_path),
    )
    with process:
        time.sleep(1.0)  # it waits for its prompt by now
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out, err) == (130, b"", b"")


def test_a_chat_at_a_terminal(default_model_file: Path, tmp_path: Path, terminals: list[Terminal]) -> None:
    terminals.append(Terminal(["chat", "--max-new-tokens", "2000"], clean_environment(tmp_path)))
    chat = terminals[0]
    assert "loading smollm2-135m" in chat.read_until(r"/help lists the commands")
    chat.read_until(r">\x1b\[0m ")
    chat.type("Write a long story about a dragon.\n")
    chat.read_until(r"[Dd]ragon\.\r\n")  # the echo
    chat.read_until(r"\w+ \w+ \w+ \w+")
    chat.type("\x03")
    assert chat.process.poll() is None
    chat.read_until(r"\(stopped\)")
    chat.read_until(r">\x1b\[0m ")
    file = tmp_path / "chat.json"
    chat.type(f"/save {file}\n")
    chat.read_until("saved to ")
    chat.read_until(r">\x1b\[0m ")
    user, answer = json.loads(file.read_text())["messages"]
    assert user["content"] == "Write a long story about a dragon." and answer["stopped"] is True
    assert len(answer["content"].split()) >= 4
    chat.type("half a line\x03")  # clears the line
    chat.read_until(r"ctrl-c again leaves")
    chat.read_until(r">\x1b\[0m ")
    chat.type("/undo\n")  # something in between: the count starts again
    chat.read_until("forgotten: Write a long story")
    chat.read_until(r">\x1b\[0m ")
    chat.type("\x03")
    chat.read_until(r"ctrl-c again leaves")
    chat.read_until(r">\x1b\[0m ")
    chat.type("\x03")
    assert chat.process.wait(PATIENCE) == 130
    history = tmp_path / "home" / "chat_history"
    assert "Write a long story about a dragon." in history.read_text() and history.stat().st_mode & 0o077 == 0


def test_a_chat_without_colours_ends_with_ctrl_d(tiny: str, tmp_path: Path, terminals: list[Terminal]) -> None:
    terminals.append(Terminal(["chat", "-m", tiny, "--stats"], clean_environment(tmp_path, NO_COLOR="1")))
    chat = terminals[0]
    chat.read_until("/help lists the commands")
    chat.read_until("> ")
    chat.type("/set max_new_tokens 3\n")
    chat.read_until("max_new_tokens = 3\r\n")
    chat.read_until("> ")
    chat.type("Hi\n")
    assert not re.search(r"\x1b\[[0-9;]*m", chat.read_until("3 new tokens"))
    chat.read_until("> ")
    chat.type("\x04")
    assert chat.process.wait(PATIENCE) == 0


def test_errors_and_help_are_coloured_on_a_terminal(tmp_path: Path, terminals: list[Terminal]) -> None:
    terminals.append(Terminal(["rum"], clean_environment(tmp_path)))
    assert terminals[0].read_until("did you mean run").startswith("\x1b[1;31munspool: error:\x1b[0m")
    assert terminals[0].process.wait(PATIENCE) == 2
    terminals.append(Terminal(["models"], clean_environment(tmp_path, TERM="dumb")))
    assert "\x1b" not in terminals[1].read_until("is a model's name too")
