"""The program that `confined` runs: reads a tokenizer and texts, writes their ids, within the limits that it is given.

It imports nothing of unspool, so that it starts in a tenth of a second.
"""

from __future__ import annotations

import json
import os
import sys


def main() -> None:
    """Answer one request."""
    request = json.load(sys.stdin.buffer)
    sys.path[:] = request["path"]
    if hasattr(os, "nice"):  # what others wait for comes first
        os.nice(5)
    _set_limits(request["seconds"], request["memory"])
    answer = _encode(request["tokenizer"], request["texts"], adds_special=request["add_special_tokens"])
    json.dump(answer, sys.stdout)


def _set_limits(seconds: int, memory: int) -> None:
    try:
        import resource
    except ImportError:  # not on Windows; the wall time is limited there too
        return
    _, highest = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds + 1, seconds + 2))
    if highest == resource.RLIM_INFINITY or memory < highest:
        try:
            resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        except (OSError, ValueError):  # macOS has no such limit
            return


def _encode(tokenizer: str, texts: list[str], *, adds_special: bool) -> dict[str, object]:
    import tokenizers

    try:
        backend = tokenizers.Tokenizer.from_str(tokenizer)
        encodings = backend.encode_batch_fast(texts, add_special_tokens=adds_special)
    except Exception as error:
        return {"error": str(error)[:500]}
    except BaseException as error:  # a panic of the library
        return {"damage": str(error)[:500]}
    return {"rows": [encoding.ids for encoding in encodings]}


if __name__ == "__main__":
    main()
