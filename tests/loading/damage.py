"""Files whose bytes were changed: what opening one may do."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from unspool.errors import LoadError, UnsupportedError


def check_damaged(data: bytes, path: Path, open_file: Callable[[Path], Any]) -> None:
    """Opening and reading either works or raises our errors, and takes memory in proportion to the file."""
    path.unlink(missing_ok=True)  # a new file: an old mapping may still be alive
    path.write_bytes(data)
    tracemalloc.start()
    try:
        file = open_file(path)
        for name in file.names():
            assert file.read(name, dtype=torch.float32).shape == file.info(name).shape
    except (LoadError, UnsupportedError):
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 64 * len(data) + (1 << 18)
