"""Encoding texts in a process of its own, with limits on time and memory.

The process is started for each call: nothing is kept that could go stale, and what it costs (some tenths of a second)
is paid only for tokenizers or texts that could do harm here.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import tokenizers

from unspool.errors import InputError, LoadError

SECONDS = 3  # of CPU time, and as many for each million characters of text
MEMORY_BYTES = 1 << 30  # and `_MEMORY_OF_A_CHARACTER` for each character
_MEMORY_OF_A_CHARACTER = 400
_START_SECONDS = 30  # of wall time, until the process has its libraries; the machine may be busy
_WALL_FACTOR = 5

_PROGRAM = Path(__file__).with_name("confined_program.py")


def encode_confined(backend: tokenizers.Tokenizer, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
    """The ids of texts; a tokenizer that takes too long, takes too much or crashes ends in an error."""
    num_characters = sum(map(len, texts))
    seconds = SECONDS + SECONDS * num_characters // 1_000_000
    request = {
        "path": sys.path,
        "seconds": seconds,
        "memory": MEMORY_BYTES + _MEMORY_OF_A_CHARACTER * num_characters,
        "tokenizer": backend.to_str(pretty=False),
        "texts": texts,
        "add_special_tokens": add_special_tokens,
    }
    what = (
        f"a text of {num_characters} characters can't be encoded: this tokenizer's rules are such that their work "
        "can't be bounded beforehand, so they ran in a process of their own, and"
    )
    try:
        ended = subprocess.run(
            [sys.executable, "-I", str(_PROGRAM)],
            input=json.dumps(request).encode(),
            capture_output=True,
            timeout=_START_SECONDS + _WALL_FACTOR * seconds,
            env={**os.environ, "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "RUST_BACKTRACE": "0"},
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise InputError(f"{what} it did not end in {error.timeout:.0f} s") from None
    except (OSError, MemoryError) as error:
        raise InputError(f"{what} it could not be started: {error}") from error
    if ended.returncode == -getattr(signal, "SIGXCPU", 0):
        raise InputError(f"{what} it took more than {seconds} s")
    if ended.returncode != 0:
        raise InputError(f"{what} it ended with the code {ended.returncode}; it may have run out of memory")
    answer = json.loads(ended.stdout)
    if "damage" in answer:
        raise LoadError(f"the tokenizer's files are damaged, so that a text can't be worked on: {answer['damage']}")
    if "error" in answer:
        raise InputError(f"a text can't be encoded by this tokenizer: {answer['error']}")
    rows: list[list[int]] = answer["rows"]
    return rows
