"""The first compilation of a grammar, in a process with limits: one that takes too long or too much harms nobody.

The process holds one vocabulary and answers request after request; it is killed when it overruns, and started again
when the next grammar comes.
"""

from __future__ import annotations

import atexit
import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from unspool.errors import ResourceError
from unspool.forks import after_fork, make_lock
from unspool.grammar.vocabulary import GrammarVocabulary

SECONDS: Final = 2.0  # of one compilation, and its first masks
MEMORY_BYTES: Final = 300 << 20  # beyond what the vocabulary takes
_START_SECONDS: Final = 60.0  # until it has read the vocabulary; the machine may be busy
_PROGRAM: Final = Path(__file__).with_name("guard_program.py")
_MOST_GUARDS: Final = 2  # vocabularies at once


class Guard:
    """A process that compiles grammars over one vocabulary."""

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", str(_PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "RAYON_NUM_THREADS": "1", "RUST_BACKTRACE": "0"},
        )
        request = {
            "path": sys.path,
            "tokenizer": vocabulary.text,
            "size": vocabulary.size,
            "ends": vocabulary.ends,
            "memory": MEMORY_BYTES,
        }
        if self.ask(request, _START_SECONDS) is None:
            self.kill()
            raise ResourceError("the process that checks grammars could not be started; is there memory for it?")

    def ask(self, request: Mapping[str, Any], seconds: float) -> dict[str, Any] | None:
        """The answer to a request; None if there was none in time, or the process ended."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.write(json.dumps(request).encode() + b"\n")
            stdin.flush()
        except OSError:
            return None
        deadline, line = time.monotonic() + seconds, b""
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                left = deadline - time.monotonic()
                if left <= 0 or not selector.select(left):
                    return None
                piece = os.read(stdout.fileno(), 65_536)
                if not piece:
                    return None
                line += piece
        answer: dict[str, Any] = json.loads(line)
        return answer

    def kill(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


_guards: dict[GrammarVocabulary, Guard] = {}  # those that wait to be asked, the latest last
_lock = make_lock(sys.modules[__name__], "_lock")  # around the dictionary, for a moment


# The processes answer whoever forked this one: a child that asked them too would read the answers of both.
after_fork(sys.modules[__name__], lambda _: _guards.clear())


def check_guarded(vocabulary: GrammarVocabulary, text: str, limits: Mapping[str, Any]) -> str:
    """Why a grammar can't be compiled within the limits; empty if it can. Others, of other vocabularies, don't wait."""
    with _lock:
        guard = _guards.pop(vocabulary, None)  # nobody else's while it is asked
    guard = Guard(vocabulary) if guard is None else guard
    try:
        answer = guard.ask({"grammar": text, "limits": dict(limits)}, SECONDS)
    except BaseException:
        guard.kill()
        raise
    if answer is None:
        guard.kill()
        return (
            f"it is too complex: compiling it took more than {SECONDS:g} s or {MEMORY_BYTES >> 20} MB; use fewer "
            "alternatives, shorter patterns or smaller counts"
        )
    _put_back(vocabulary, guard)
    return str(answer["error"])


def _put_back(vocabulary: GrammarVocabulary, guard: Guard) -> None:
    """Keep a process for the next grammar of its vocabulary, and no more of them than are kept."""
    with _lock:
        extra = [guard] if vocabulary in _guards else []
        _guards.setdefault(vocabulary, guard)
        extra += [_guards.pop(one) for one in list(_guards)[:-_MOST_GUARDS]]
    for one in extra:
        one.kill()


@atexit.register
def close_guards() -> None:
    """End the processes."""
    with _lock:
        for guard in _guards.values():
            guard.kill()
        _guards.clear()
