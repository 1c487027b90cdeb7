"""What this installation has to run kernels with."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec


@cache
def has_triton() -> bool:
    """Whether Triton is installed; it is imported only where a GPU is used."""
    return find_spec("triton") is not None
