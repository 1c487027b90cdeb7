"""The program that `guard` runs: compiles grammars over one vocabulary, one line of JSON each, within a memory limit.

It imports nothing of unspool, so that it starts in a tenth of a second.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def main() -> None:
    """Read the vocabulary, then answer until the input ends."""
    if hasattr(os, "nice"):  # answers come before grammars that nobody may ever use
        os.nice(10)
    first = json.loads(sys.stdin.readline())
    sys.path[:] = first["path"]
    import llguidance

    tokens = llguidance.LLTokenizer(first["tokenizer"], n_vocab=first["size"], eos_token=list(first["ends"]))
    _limit_memory(first["memory"])
    _answer({})
    for line in sys.stdin:
        request = json.loads(line)
        try:
            _answer({"error": _check(llguidance, tokens, request)})
        except MemoryError:
            _answer({"error": "it is too complex: there is no memory to compile it"})


def _check(library: Any, tokens: Any, request: dict[str, Any]) -> str:
    limits = library.LLParserLimits(**request["limits"])
    matcher = library.LLMatcher(tokens, request["grammar"], log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()  # the first mask is part of what a hostile grammar can make costly
    return str(matcher.get_error()) if matcher.is_error() else ""


def _limit_memory(more: int) -> None:
    try:
        import resource
    except ImportError:  # not on Windows
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        with open("/proc/self/statm") as file:  # noqa: PTH123 - this program starts with as few imports as it can
            held = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + more, held + more))
    except (OSError, ValueError):  # no such limit on this system
        return


def _answer(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
