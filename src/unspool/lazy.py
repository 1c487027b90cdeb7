"""Names of a package that are imported when they are first asked for."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module


def find_lazily(package: str, homes: Mapping[str, str]) -> Callable[[str], object]:
    """A module's `__getattr__` that imports a name from its home, the module that `homes` gives for it."""

    def find(name: str) -> object:
        home = homes.get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(home), name)
        setattr(sys.modules[package], name, value)  # the next look-up finds it there
        return value

    return find
