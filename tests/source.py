"""The package's source as syntax trees, for tests about the code itself."""

from __future__ import annotations

import ast
from functools import lru_cache
from pathlib import Path

import unspool

SOURCE = Path(unspool.__file__).parent


@lru_cache
def read_source() -> dict[str, ast.Module]:
    """Every file by its path in the package; parsed once, because that takes seconds."""
    return {
        str(path.relative_to(SOURCE)): ast.parse(path.read_text(), str(path)) for path in sorted(SOURCE.rglob("*.py"))
    }
