"""Finding the source of a kernel quickly, which Triton asks for when a kernel is defined.

`inspect` reads a function's lines token by token to find where they end: half of the time that importing our hundred
kernels takes.
"""

from __future__ import annotations

import inspect
import linecache
from typing import Any


def read_lines(function: Any) -> tuple[list[str], int]:
    """The lines of a function of a module's top level, decorators included, and the number of the first."""
    code = function.__code__
    lines, first = linecache.getlines(code.co_filename), code.co_firstlineno
    ends = [last for _, last, column, _ in code.co_positions() if last is not None and column is not None]
    end = max(ends, default=first)
    if end == first or end > len(lines):  # Python keeps no positions, or the file has changed
        return inspect.getsourcelines(function)
    return lines[first - 1 : end], first


class _Inspect:
    """`inspect`, except for the lines of our kernels."""

    def __getattr__(self, name: str) -> Any:
        return getattr(inspect, name)

    def getsourcelines(self, function: Any) -> tuple[list[str], int]:
        is_ours = getattr(function, "__module__", "").startswith("unspool.") and hasattr(function, "__code__")
        return read_lines(function) if is_ours else inspect.getsourcelines(function)


def read_sources_quickly() -> None:
    """Let Triton have the lines of our kernels by `read_lines`."""
    from triton.runtime import jit

    if getattr(jit, "inspect", None) is inspect:  # another Triton, or done already
        jit.inspect = _Inspect()
