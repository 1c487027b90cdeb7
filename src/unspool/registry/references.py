"""Objects named before they are imported, so that a table of them costs nothing to read."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from unspool.errors import PluginError

Reference = str | type
"""A class, or where it is: "package.module:Name"."""


def resolve(reference: Any) -> Any:
    """The object that a reference names; anything but a string is the object already."""
    if not isinstance(reference, str):
        return reference
    module, _, name = reference.partition(":")
    found = getattr(sys.modules.get(module), name, None)  # a module that another thread imports may lack it yet
    return getattr(import_module(module), name) if found is None else found


def find_name(reference: Reference) -> str:
    """The name of a class, without importing it."""
    return reference.partition(":")[2] if isinstance(reference, str) else reference.__name__


def find_home(reference: Reference) -> str:
    """The module of a class, without importing it."""
    return reference.partition(":")[0] if isinstance(reference, str) else reference.__module__


def is_from(kind: type, *packages: str) -> bool:
    """Whether a class was written in one of these packages: asked of its module's name, so nothing is imported."""
    return kind.__module__.partition(".")[0] in packages


def check_maker(part: str, make: Any) -> None:
    """Raise a PluginError if what should make a part is no function."""
    if not callable(resolve(make)):
        raise PluginError(f"the {part} has no function that makes it")
